"""Bodies of the OpenAI routes, checked and tokenized."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from mamba_eagle.core import MAX_TOP_LOGPROBS, SamplingParams
from mamba_eagle.server.cache_fields import read_cache_hints
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, all_of, as_text, shown
from mamba_eagle.server.sampling import (
    check,
    read_params,
    read_samples,
    read_seed,
    refuse_constraints,
)
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import PromptRequest
from mamba_eagle.tokenizer.text import TemplateError


class OpenAIJob(msgspec.Struct, kw_only=True):
    rid: str
    model: str
    prompts: list[PromptRequest]
    stream: bool
    include_usage: bool
    meta_info: bool  # each choice has /generate's meta_info; sglang's evaluations ask for it
    logprobs: int | None = None  # how many best ones beside the token's own; None: none at all
    echoes: list[str] = []  # completions with echo: the prompts' text, which comes first


async def parse_completion(fields: Fields, state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    _refuse(fields, ("suffix",))
    best_of = fields.integer("best_of", read_samples(fields))
    if best_of != read_samples(fields):
        raise fields.wrong("best_of", "choosing among samples is not available; leave it out")
    prompts = await _prompts(fields, state)
    echo = fields.flag("echo")
    wanted = None if fields.raw("logprobs") is None else _top(fields, "logprobs")
    tokenizer = state.need_tokenizer("/v1/completions")
    return _job(
        fields,
        state,
        "cmpl",
        prompts,
        lambda length: fields.integer("max_tokens", 16),
        wanted,
        [tokenizer.decode(prompt) for prompt in prompts] if echo else [],
    )


async def parse_chat(fields: Fields, state: ServerState) -> OpenAIJob:
    """Raises: RequestError 400"""
    _refuse(fields, ("tools", "functions"))
    tokenizer = state.need_tokenizer("/v1/chat/completions")
    messages = _messages(fields)
    try:
        text = tokenizer.render_chat(messages)
    except TemplateError as error:
        raise RequestError(str(error), param="messages") from None
    # The template writes the special tokens itself.
    ids = state.check_prompt(await state.encode(text, "messages", False), "messages")
    wanted = _top(fields, "top_logprobs") if fields.flag("logprobs") else None

    def max_tokens(length: int) -> int:
        # As with OpenAI, a chat without a limit goes on until the model stops.
        default = fields.integer("max_tokens", state.context_length - length)
        return fields.integer("max_completion_tokens", default)

    return _job(fields, state, "chatcmpl", [ids], max_tokens, wanted, [])


def _job(
    fields: Fields,
    state: ServerState,
    kind: str,
    prompts: list[list[int]],
    max_tokens: Any,
    logprobs: int | None,
    echoes: list[str],
) -> OpenAIJob:
    rid = fields.text("rid") or f"{kind}-{uuid.uuid4().hex}"
    n = read_samples(fields)
    seed = read_seed(fields)
    requests = []
    for i, ids in enumerate(prompts):
        own = rid if len(prompts) == 1 else f"{rid}_{i}"
        requests.append(
            PromptRequest(
                rid=own,
                token_ids=ids,
                sampling=_sampling(fields, state, max_tokens(len(ids))),
                seed=seed,
                n=n,
                sample_rids=[own] if n == 1 else [f"{own}_{k}" for k in range(n)],
                return_logprob=logprobs is not None,
                logprob_start=0 if echoes and logprobs is not None else -1,
                top_logprobs=logprobs or 0,
                cache=read_cache_hints(fields, len(ids)),
            )
        )
    options = fields.object("stream_options")
    return OpenAIJob(
        rid=rid,
        model=fields.text("model") or state.model_name,
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
    if max_tokens < 0:
        names = [k for k in ("max_completion_tokens", "max_tokens") if fields.raw(k) is not None]
        raise fields.wrong(names[0], "must be 0 or more")
    check(params, state.vocab_size, "")
    return params


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


async def _prompts(fields: Fields, state: ServerState) -> list[list[int]]:
    """A string, token ids, or a list of either."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return [await _encode(fields.text("prompt"), "prompt", state)]
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", "must be a string, a list of token ids, or a list of either")
    if isinstance(value[0], str):
        texts = all_of(value, as_text)
        if texts is None:
            raise fields.wrong("prompt", "must be a list of strings, as its first entry is one")
        return [await _encode(text, f"prompt[{i}]", state) for i, text in enumerate(texts)]
    if isinstance(value[0], list):
        if not all(isinstance(one, list) for one in value):
            raise fields.wrong("prompt", "must be a list of lists, as its first entry is one")
        return [state.check_prompt(one, f"prompt[{i}]") for i, one in enumerate(value)]
    return [state.check_prompt(value, "prompt")]


async def _encode(text: str, name: str, state: ServerState) -> list[int]:
    if not text:
        raise RequestError(f'{name} = "": the prompt is empty', param=name)
    return state.check_prompt(await state.encode(text, name), name)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Messages with their content as plain text; other keys are for the template."""
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.wrong("messages", "must be a list of messages, at least one")
    messages = []
    for i, entry in enumerate(value):
        name = f"messages[{i}]"
        if not isinstance(entry, dict):
            raise RequestError(f"{name} = {shown(entry)}: must be an object", param="messages")
        message = Fields(entry, name + ".")
        if not message.text("role"):
            raise message.wrong("role", "must be a string such as user")
        messages.append({**entry, "content": _content(message)})
    return messages


def _content(message: Fields) -> str:
    value = message.raw("content")
    if not isinstance(value, list):
        return message.text("content")
    parts = []
    for part in value:
        text = as_text(part.get("text")) if isinstance(part, dict) else None
        if text is None or part.get("type") != "text":
            raise message.wrong("content", "must be a string or parts of type text")
        parts.append(text)
    return "".join(parts)
