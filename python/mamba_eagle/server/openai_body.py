"""Bodies of the OpenAI routes, checked and tokenized."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import (
    MAX_MESSAGES,
    MAX_MODEL_LENGTH,
    MAX_RID_LENGTH,
    MAX_TOP_LOGPROBS,
)
from mamba_eagle.server.cache_fields import read_cache_hints
from mamba_eagle.server.demand import check_demand, fitting_output
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, all_of, as_text
from mamba_eagle.server.prompts import limit_prompts
from mamba_eagle.server.sampling import (
    Vocabulary,
    check,
    read_params,
    read_samples,
    read_seed,
    read_stop,
    refuse_constraints,
)
from mamba_eagle.server.schedule_fields import read_schedule
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import PromptRequest
from mamba_eagle.tokenizer.stop import StopStrings
from mamba_eagle.tokenizer.text import TemplateError

LENGTHS = ("max_completion_tokens", "max_tokens")  # the first that is given counts


class OpenAIJob(msgspec.Struct, kw_only=True):
    rid: str
    model: str
    prompts: list[PromptRequest]
    stream: bool
    include_usage: bool
    meta_info: bool  # each choice has /generate's meta_info; sglang's evaluations ask for it
    logprobs: int | None = None  # how many best ones beside the token's own; None: none at all
    echoes: list[str] = []  # completions with echo: the prompts' text, which comes first


def parse_completion(fields: Fields, state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    _refuse(fields, ("suffix",))
    n = read_samples(fields)
    if fields.integer("best_of", n) != n:
        raise fields.wrong("best_of", "choosing among samples is not available; leave it out")
    echo = fields.flag("echo")
    wanted = None if fields.raw("logprobs") is None else _top(fields, "logprobs")
    tokenizer = state.prompts.need_tokenizer("/v1/completions")
    prompts = _prompts(fields, state, n)
    return _job(
        fields,
        state,
        "cmpl",
        prompts,
        lambda length: fields.integer("max_tokens", 16),
        wanted,
        tokenizer.decode_all(prompts) if echo else [],
    )


def parse_chat(fields: Fields, state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    _refuse(fields, ("tools", "functions"))
    tokenizer = state.prompts.need_tokenizer("/v1/chat/completions")
    n = read_samples(fields)
    state.limit_samples(1, n)
    wanted = _top(fields, "top_logprobs") if fields.flag("logprobs") else None
    messages = _messages(fields)
    try:
        text = tokenizer.render_chat(messages)
    except TemplateError as error:
        raise RequestError(str(error), param="messages") from None
    # The template writes the special tokens itself.
    (ids,) = state.prompts.encode([text], ["messages"], False)

    def max_tokens(length: int) -> int:
        # As with OpenAI, a chat without a limit goes on until the model stops.
        default = fitting_output(n, wanted, state.context_length - length)
        return fields.integer(LENGTHS[0], fields.integer(LENGTHS[1], default))

    return _job(
        fields, state, "chatcmpl", [state.prompts.check(ids, "messages")], max_tokens, wanted, []
    )


def _job(
    fields: Fields,
    state: ServerState,
    kind: str,
    prompts: list[list[int]],
    max_tokens: Callable[[int], int],
    logprobs: int | None,
    echoes: list[str],
) -> OpenAIJob:
    rid = fields.short_text("rid", MAX_RID_LENGTH) or f"{kind}-{uuid.uuid4().hex}"
    n = read_samples(fields)
    seed = read_seed(fields)
    samplings: dict[int, SamplingParams] = {}  # by length: prompts share them
    stops = StopStrings(read_stop(fields))
    requests = []
    for i, ids in enumerate(prompts):
        own = rid if len(prompts) == 1 else f"{rid}_{i}"
        length = max_tokens(len(ids))
        if length not in samplings:
            samplings[length] = _sampling(fields, state, length)
        requests.append(
            PromptRequest(
                rid=own,
                token_ids=ids,
                sampling=samplings[length],
                seed=seed,
                n=n,
                sample_rids=[own] if n == 1 else [f"{own}_{k}" for k in range(n)],
                stops=stops,
                return_logprob=logprobs is not None,
                logprob_start=0 if echoes and logprobs is not None else -1,
                top_logprobs=logprobs or 0,
                cache=read_cache_hints(fields, len(ids)),
                **read_schedule(fields, state.config),
            )
        )
    top = "logprobs" if kind == "cmpl" else "top_logprobs"
    check_demand(requests, state.context_length, {"top": top, "output": _length_name(fields)})
    options = fields.object("stream_options")
    return OpenAIJob(
        rid=rid,
        model=fields.short_text("model", MAX_MODEL_LENGTH) or state.model_name,
        prompts=requests,
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        meta_info=fields.flag("return_meta_info"),
        logprobs=logprobs,
        echoes=echoes,
    )


def _sampling(fields: Fields, state: ServerState, max_tokens: int) -> SamplingParams:
    """OpenAI's fields, and those beyond them under the names that other servers take."""
    params = read_params(fields, max_tokens, fields.integer("min_tokens", 0))
    names = {"max_new_tokens": _length_name(fields), "min_new_tokens": "min_tokens"}
    vocabulary = Vocabulary(state.vocab_size, state.manager.engine.eos_token_ids)
    check(params, vocabulary, names=names)
    return params


def _length_name(fields: Fields) -> str:
    """The field that limits the output, as this client calls it."""
    return next((name for name in LENGTHS if fields.raw(name) is not None), LENGTHS[1])


def _refuse(fields: Fields, names: tuple[str, ...]) -> None:
    refuse_constraints(fields)
    for name in names:
        if fields.raw(name):
            raise fields.wrong(name, "is not available in this server; leave the field out")
    kind = fields.object("response_format").raw("type")
    if kind not in (None, "text"):
        raise fields.wrong(
            "response_format",
            "constrained output is not available in this server; leave the field out",
        )


def _top(fields: Fields, name: str) -> int:
    value = fields.raw(name)
    # Some clients of /v1/completions send the chat route's true.
    number = int(value) if name == "logprobs" and value is True else fields.integer(name, 0)
    if not 0 <= number <= MAX_TOP_LOGPROBS:
        raise fields.wrong(name, f"must be between 0 and {MAX_TOP_LOGPROBS}")
    return number


def _prompts(fields: Fields, state: ServerState, n: int) -> list[list[int]]:
    """A string, token ids, or a list of either."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        state.limit_samples(1, n)
        return state.prompts.prompts([fields.text("prompt")], ["prompt"])
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", "must be a string, a list of token ids, or a list of either")
    batch = isinstance(value[0], (str, list))
    if batch:
        limit_prompts(fields, "prompt", value)
    state.limit_samples(len(value) if batch else 1, n * len(value) if batch else n)
    if isinstance(value[0], str):
        return state.prompts.text_list(fields, "prompt")
    if isinstance(value[0], list):
        return state.prompts.id_lists(fields, "prompt")
    return [state.prompts.check(value, "prompt")]


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Messages with their content as plain text; other keys are for the template."""
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.wrong("messages", "must be a list of messages, at least one")
    if len(value) > MAX_MESSAGES:
        raise fields.too_many("messages", "messages", len(value), MAX_MESSAGES)
    messages = []
    for i, entry in enumerate(value):
        name = f"messages[{i}]"
        if not isinstance(entry, dict):
            raise Fields({name: entry}).wrong(name, "must be an object")
        message = Fields(entry, name + ".")
        if not message.text("role"):
            raise message.wrong("role", "must be a string such as user")
        messages.append({**entry, "content": _content(message)})
    return messages


def _content(message: Fields) -> str:
    value = message.raw("content")
    if not isinstance(value, list):
        return message.text("content")
    parts = all_of(value, _text_part)
    if parts is None:
        raise message.wrong("content", "must be a string or parts of type text")
    return "".join(parts)


def _text_part(part: Any) -> str | None:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return as_text(part.get("text")) if is_text else None
