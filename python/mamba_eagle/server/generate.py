"""POST /generate: the body checked and tokenized, its samples run, the replies."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.core import MAX_TOP_LOGPROBS
from mamba_eagle.server.cache_fields import read_cache_hints
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.fields import Fields, all_of, as_text, read_fields, shown
from mamba_eagle.server.reply import Reply
from mamba_eagle.server.sampling import Sampling, read_sampling, refuse_constraints
from mamba_eagle.server.sse import (
    DONE,
    EventStream,
    event,
    sample_error,
    updates,
    wait_until_done,
)
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.sample import LiveRequest, PromptRequest

router = APIRouter()


class GenerateJob(msgspec.Struct, kw_only=True):
    """A /generate body, understood."""

    rid: str
    prompts: list[PromptRequest]
    as_list: bool  # the reply is a list
    stream: bool
    text_in_logprobs: bool


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate(request: Request) -> Response:
    state = server_state(request)
    job = await parse_generate(await read_fields(request), state)
    live = state.submit(job.rid, job.prompts)
    if job.stream:
        events = stream_replies(state, job, live)
        return EventStream(events, lambda: state.manager.release(live))
    if not await wait_until_done(request, state.manager, live):
        return Response(status_code=499)  # nobody reads it
    for sample in live.samples:
        if (error := sample_error(sample)) is not None:
            raise error
    replies = [
        Reply(sample, state.manager.tokenizer, job.text_in_logprobs).as_dict()
        for sample in live.samples
    ]
    return json_response(replies if job.as_list else replies[0])


async def stream_replies(
    state: ServerState, job: GenerateJob, live: LiveRequest
) -> AsyncGenerator[bytes, None]:
    """Cumulative replies; with several samples each names its place by ``index``."""
    tokenizer = state.manager.tokenizer
    replies = [Reply(sample, tokenizer, job.text_in_logprobs) for sample in live.samples]
    begun = False
    async for sample in updates(live, state.config.stream_interval):
        error = sample_error(sample)
        if error is not None and not begun:
            raise error
        begun = True
        body = error.body() if error is not None else replies[sample.index].as_dict()
        if job.as_list:
            body["index"] = sample.index
        yield event(body)
    yield DONE


# ── the body ─────────────────────────────────────────────────────────────────────────────────


async def parse_generate(fields: Fields, state: ServerState) -> GenerateJob:
    """Raises: RequestError 400 that names the field and its value."""
    refuse_constraints(fields)
    prompts, is_batch = await _read_prompts(fields, state)
    count = len(prompts)
    samplings = _read_samplings(fields, count, state)
    rid, rids = _read_rids(fields, count, is_batch)
    requests: list[PromptRequest] = []
    number = 0  # of the sample in the whole request
    for i, (token_ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        if sampling.n == 1:
            sample_rids = [rids[i]]
        elif rids[i] == rid:
            sample_rids = [f"{rid}_{number + k}" for k in range(sampling.n)]
        else:
            sample_rids = [f"{rids[i]}_{k}" for k in range(sampling.n)]
        number += sampling.n
        own = _of_prompt(fields, i, count)
        requests.append(
            PromptRequest(
                rid=rids[i],
                token_ids=token_ids,
                sampling=sampling.params,
                seed=sampling.seed,
                n=sampling.n,
                sample_rids=sample_rids,
                return_spec_trace=own.flag("return_spec_trace"),
                cache=read_cache_hints(fields, len(token_ids)),
                **_read_logprobs(own, len(token_ids)),
            )
        )
    return GenerateJob(
        rid=rid,
        prompts=requests,
        as_list=is_batch or number > 1,
        stream=fields.flag("stream"),
        text_in_logprobs=fields.flag("return_text_in_logprobs"),
    )


async def _read_prompts(fields: Fields, state: ServerState) -> tuple[list[list[int]], bool]:
    """The prompts' token ids, and whether they came as a list of prompts."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if text is not None and ids is not None:
        raise RequestError("text and input_ids are both given: send one of them", param="text")
    if text is not None:
        if isinstance(text, str):
            return [await _encode(fields.text("text"), "text", state)], False
        texts = all_of(text, as_text)
        if texts is None:
            raise fields.wrong("text", "must be a string or a list of strings")
        if not texts:
            raise fields.wrong("text", "the list has no prompt")
        return [await _encode(one, f"text[{i}]", state) for i, one in enumerate(texts)], True
    if ids is None:
        raise RequestError("text or input_ids is needed: neither is given", param="text")
    if not isinstance(ids, list):
        raise fields.wrong("input_ids", "must be a list of token ids, or a list of such lists")
    if ids and isinstance(ids[0], list):
        for i, one in enumerate(ids):
            if not isinstance(one, list):
                raise RequestError(
                    f"input_ids[{i}] = {shown(one)}: must be a list of token ids, as the first is",
                    param="input_ids",
                )
        return [state.check_prompt(one, f"input_ids[{i}]") for i, one in enumerate(ids)], True
    return [state.check_prompt(ids, "input_ids")], False


async def _encode(text: str, name: str, state: ServerState) -> list[int]:
    if not text:
        raise RequestError(f'{name} = "": the prompt is empty', param=name)
    return state.check_prompt(await state.encode(text, name), name)


def _read_samplings(fields: Fields, count: int, state: ServerState) -> list[Sampling]:
    value = fields.raw("sampling_params")
    if isinstance(value, list):
        if len(value) != count:
            raise fields.wrong(
                "sampling_params", f"the list has {len(value)} entries for {count} prompts"
            )
        each = []
        for i, entry in enumerate(value):
            if entry is not None and not isinstance(entry, dict):
                raise RequestError(
                    f"sampling_params[{i}] = {shown(entry)}: must be an object",
                    param="sampling_params",
                )
            each.append(Fields(entry or {}, f"sampling_params[{i}]."))
    else:
        each = [fields.object("sampling_params")] * count
    samplings: list[Sampling] = []
    for i, one in enumerate(each):
        # One object for all prompts is read once.
        shared = i and one is each[0]
        samplings.append(samplings[0] if shared else read_sampling(one, state.vocab_size))
        if samplings[i].params.stop:
            state.need_tokenizer("sampling_params.stop")
    return samplings


def _read_rids(fields: Fields, count: int, is_batch: bool) -> tuple[str, list[str]]:
    """The request's name and its prompts'."""
    value = fields.raw("rid")
    if value is None:
        rid = uuid.uuid4().hex
    elif isinstance(value, list) and is_batch:
        rids = all_of(value, as_text)
        if rids is None or len(rids) != count or not all(rids):
            raise fields.wrong("rid", f"must be a string or a list of {count} strings")
        if len(set(rids)) != count:
            raise fields.wrong("rid", "the names must differ")
        return uuid.uuid4().hex, rids
    elif as_text(value):
        rid = value
    else:
        raise fields.wrong(
            "rid", "must be a string, not empty" + " or a list of strings" * is_batch
        )
    if not is_batch or count == 1:
        return rid, [rid] * count
    return rid, [f"{rid}_{i}" for i in range(count)]


def _of_prompt(fields: Fields, i: int, count: int) -> Fields:
    """Prompt i's own of the fields that may be one value or a list with one a prompt."""
    own = {}
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_spec_trace"):
        value = fields.raw(name)
        if isinstance(value, list):
            if len(value) != count:
                raise fields.wrong(name, f"the list has {len(value)} entries for {count} prompts")
            value = value[i]
        own[name] = value
    return Fields(own)


def _read_logprobs(mine: Fields, prompt_length: int) -> dict[str, Any]:
    """What a prompt wants of logprobs."""
    wanted = mine.flag("return_logprob")
    start = mine.integer("logprob_start_len", -1)
    best = mine.integer("top_logprobs_num", 0)
    if not wanted:
        return {}
    if not -1 <= start <= prompt_length:
        raise mine.wrong(
            "logprob_start_len",
            f"must be between 0 and {prompt_length}, the prompt's length, or -1: output only",
        )
    if not 0 <= best <= MAX_TOP_LOGPROBS:
        raise mine.wrong("top_logprobs_num", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    return {
        "return_logprob": True,
        "logprob_start": -1 if start == prompt_length else start,
        "top_logprobs": best,
    }
