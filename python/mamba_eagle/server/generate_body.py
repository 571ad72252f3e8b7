"""The body of POST /generate, checked and tokenized."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from mamba_eagle.limits import (
    MAX_PROMPTS,
    MAX_RID_LENGTH,
    MAX_STOP_CHARACTERS,
    MAX_TOP_LOGPROBS,
)
from mamba_eagle.server.cache_fields import read_cache_hints
from mamba_eagle.server.demand import check_demand
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, all_of, as_text
from mamba_eagle.server.grammars import refuse_misplaced
from mamba_eagle.server.sampling import Sampling, Vocabulary, read_sampling
from mamba_eagle.server.schedule_fields import read_schedule
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import PromptRequest
from mamba_eagle.tokenizer.stop import StopStrings


class GenerateJob(msgspec.Struct, kw_only=True):
    """A /generate body, understood."""

    rid: str
    prompts: list[PromptRequest]
    as_list: bool  # the reply is a list
    stream: bool
    incremental: bool  # a stream's events have what is new, not all so far
    text_in_logprobs: bool


def parse_generate(fields: Fields, state: ServerState) -> GenerateJob:
    """Raises: RequestError 400 that names the field and its value."""
    refuse_misplaced(fields)
    # What is cheap to refuse comes before the prompts, which may take long to encode.
    is_batch, count = _count_prompts(fields)
    samplings = _read_samplings(fields, count, state)
    state.limit_samples(count, sum(sampling.n for sampling in samplings))
    rid, rids = _read_rids(fields, count, is_batch)
    requests: list[PromptRequest] = []
    number = 0  # of the sample in the whole request
    for i, (token_ids, sampling) in enumerate(
        zip(_read_prompts(fields, state), samplings, strict=True)
    ):
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
                stops=sampling.stops,
                return_spec_trace=own.flag("return_spec_trace"),
                cache=read_cache_hints(fields, len(token_ids)),
                **read_schedule(fields, state.config),
                **_read_logprobs(own, len(token_ids)),
            )
        )
    check_demand(requests, state.context_length)
    return GenerateJob(
        rid=rid,
        prompts=requests,
        as_list=is_batch or number > 1,
        stream=fields.flag("stream"),
        incremental=fields.flag("incremental", state.config.incremental_streaming_output),
        text_in_logprobs=fields.flag("return_text_in_logprobs"),
    )


# ── prompts ──────────────────────────────────────────────────────────────────────────────────


def _count_prompts(fields: Fields) -> tuple[bool, int]:
    """Whether the prompts came as a list, and how many there are."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if text is not None and ids is not None:
        raise RequestError("text and input_ids are both given: send one of them", param="text")
    if text is None and ids is None:
        raise RequestError("text or input_ids is needed: neither is given", param="text")
    if text is not None:
        if not isinstance(text, (str, list)):
            raise fields.wrong("text", "must be a string or a list of strings")
        if not text and isinstance(text, list):
            raise fields.wrong("text", "the list has no prompt")
        value = text
    else:
        if not isinstance(ids, list):
            raise fields.wrong("input_ids", "must be a list of token ids, or a list of such lists")
        value = ids if ids and isinstance(ids[0], list) else ""
    if isinstance(value, str):
        return False, 1
    if len(value) > MAX_PROMPTS:
        name = "text" if text is not None else "input_ids"
        raise fields.too_many(name, "prompts", len(value), MAX_PROMPTS)
    return True, len(value)


def _read_prompts(fields: Fields, state: ServerState) -> list[list[int]]:
    reader = state.prompts
    if isinstance(fields.raw("text"), str):
        return reader.prompts([fields.text("text")], ["text"])
    if fields.raw("text") is not None:
        return reader.text_list(fields, "text")
    ids = fields.raw("input_ids")
    if ids and isinstance(ids[0], list):
        return reader.id_lists(fields, "input_ids")
    return [reader.check(ids, "input_ids")]


# ── sampling ─────────────────────────────────────────────────────────────────────────────────


def _read_samplings(fields: Fields, count: int, state: ServerState) -> list[Sampling]:
    vocabulary = Vocabulary(state.vocab_size, state.manager.engine.eos_token_ids)
    value = fields.raw("sampling_params")
    if isinstance(value, list):
        samplings = _read_each(fields, value, count, vocabulary, state)
    else:
        # One object for all prompts is read once.
        own = fields.object("sampling_params")
        samplings = [read_sampling(own, vocabulary, state.grammars)] * count
    if any(sampling.stops for sampling in samplings):
        state.prompts.need_tokenizer("sampling_params.stop")
    return samplings


def _read_each(
    fields: Fields, values: list[Any], count: int, vocabulary: Vocabulary, state: ServerState
) -> list[Sampling]:
    if len(values) != count:
        raise fields.wrong(
            "sampling_params", f"the list has {len(values)} entries for {count} prompts"
        )
    known: dict[tuple[str, ...], StopStrings] = {}  # prompts with the same strings share them
    characters = 0
    samplings = []
    for i, entry in enumerate(values):
        name = f"sampling_params[{i}]"
        if entry is not None and not isinstance(entry, dict):
            raise Fields({name: entry}).wrong(name, "must be an object")
        one = read_sampling(Fields(entry or {}, name + "."), vocabulary, state.grammars)
        strings = tuple(one.params.stop)
        if strings not in known:
            known[strings] = one.stops
            characters += sum(map(len, strings))
        if characters > MAX_STOP_CHARACTERS:
            what = "characters of different stop strings"
            raise fields.too_many("sampling_params", what, characters, MAX_STOP_CHARACTERS)
        samplings.append(one._replace(stops=known[strings]))
    return samplings


# ── names ────────────────────────────────────────────────────────────────────────────────────


def _read_rids(fields: Fields, count: int, is_batch: bool) -> tuple[str, list[str]]:
    """The request's name and its prompts'."""
    value = fields.raw("rid")
    if isinstance(value, list) and is_batch:
        return uuid.uuid4().hex, _read_rid_list(fields, value, count)
    if value is not None and not as_text(value):
        raise fields.wrong(
            "rid", "must be a string, not empty" + " or a list of strings" * is_batch
        )
    rid = fields.short_text("rid", MAX_RID_LENGTH) or uuid.uuid4().hex
    if not is_batch or count == 1:
        return rid, [rid] * count
    return rid, [f"{rid}_{i}" for i in range(count)]


def _read_rid_list(fields: Fields, value: list[Any], count: int) -> list[str]:
    rids = all_of(value, as_text)
    if rids is None or len(rids) != count or not all(rids):
        raise fields.wrong("rid", f"must be a string or a list of {count} strings")
    if len(set(rids)) != count:
        raise fields.wrong("rid", "the names must differ")
    for i, rid in enumerate(rids):
        if len(rid) > MAX_RID_LENGTH:
            Fields({f"rid[{i}]": rid}).short_text(f"rid[{i}]", MAX_RID_LENGTH)
    return rids


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────


def _of_prompt(fields: Fields, i: int, count: int) -> Fields:
    """Prompt i's own of the fields that may be one value or a list with one per prompt."""
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
