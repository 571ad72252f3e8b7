"""The tokenizer alone: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_DETOKENIZED_IDS, MAX_PROMPTS
from mamba_eagle.server.chat_body import render_chat
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.json_list import JsonList
from mamba_eagle.server.state import ServerState, server_state

router = APIRouter()
PIECE = 8192  # token ids put into JSON at a time


@router.post("/v1/tokenize")
@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """``prompt`` (or ``text``), a string or a list of strings, or a chat's ``messages`` with all
    that its template is given, to token ids."""
    # In a thread, as chats are: a template may take long.
    return json_response(await server_state(request).read(request, _tokenize, is_chat=True))


@router.post("/v1/detokenize")
@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """``tokens``, a list of ids or a list of such lists, to text."""
    return json_response(await server_state(request).read(request, _detokenize))


@router.api_route("/tokenizer_info", methods=["GET", "HEAD"])
async def tokenizer_info(request: Request) -> Response:
    """What evaluators need to know of the tokenizer: special tokens, and the chat template that
    this server renders with."""
    state = server_state(request)
    tokenizer = state.prompts.need_tokenizer("/tokenizer_info").hf
    return json_response(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": state.vocab_size,
            "model_max_length": state.context_length,
            **tokenizer.special_tokens_map,
            "chat_template": state.chat.template.source() or None,
        }
    )


def _tokenize(fields: Fields, state: ServerState) -> bytes:
    if fields.raw("messages") is not None:
        return _tokenize_chat(fields, state)
    name = "prompt" if fields.raw("prompt") is not None else "text"
    value = fields.raw(name)
    if value is None:
        raise RequestError(
            "prompt is needed: a string or a list of strings; or messages", param="prompt"
        )
    texts = fields.texts(name, "texts", MAX_PROMPTS)
    special = fields.flag("add_special_tokens", True)
    single = isinstance(value, str)
    names = [name if single else f"{name}[{i}]" for i in range(len(texts))]
    ids = state.prompts.encode(texts, names, special)
    tokens = [_as_json(one) for one in ids]
    return msgspec.json.encode(
        {
            "tokens": tokens[0] if single else tokens,
            "count": len(ids[0]) if single else [len(one) for one in ids],
            "max_model_len": state.context_length,
        }
    )


def _tokenize_chat(fields: Fields, state: ServerState) -> bytes:
    """The prompt that /v1/chat/completions makes of the same body."""
    for name in ("prompt", "text"):
        if fields.raw(name) is not None:
            raise fields.wrong(name, "messages are given as well: send one of the two")
    state.prompts.need_tokenizer("/tokenize")
    _, _, text = render_chat(fields, state)
    # The template writes the special tokens itself.
    (ids,) = state.prompts.encode([text], ["messages"], fields.flag("add_special_tokens"))
    return msgspec.json.encode(
        {"tokens": _as_json(ids), "count": len(ids), "max_model_len": state.context_length}
    )


def _as_json(ids: list[int]) -> msgspec.Raw:
    text = JsonList()
    for begin in range(0, len(ids), PIECE):
        text.extend(ids[begin : begin + PIECE])
    return text.raw()


def _detokenize(fields: Fields, state: ServerState) -> bytes:
    tokenizer = state.prompts.need_tokenizer("/detokenize")
    skip = fields.flag("skip_special_tokens", True)
    value = fields.raw("tokens")
    single = not (isinstance(value, list) and value and isinstance(value[0], list))
    lists: list[Any] = [value] if single else value
    if len(lists) > MAX_PROMPTS:
        raise fields.too_many("tokens", "lists", len(lists), MAX_PROMPTS)
    total = sum(len(one) for one in lists if isinstance(one, list))
    if total > MAX_DETOKENIZED_IDS:
        raise fields.too_many("tokens", "token ids", total, MAX_DETOKENIZED_IDS)
    checked = [_check_ids(fields, one, state.vocab_size) for one in lists]
    texts = tokenizer.decode_all(checked, skip)
    text = texts[0] if single else texts
    # SGLang's clients read "text", vLLM's and lm-eval "prompt".
    return msgspec.json.encode({"text": text, "prompt": text})


def _check_ids(fields: Fields, value: Any, vocab_size: int) -> list[int]:
    ids = Fields({"tokens": value}).integers("tokens", "token ids", MAX_DETOKENIZED_IDS)
    if value is None or (ids and not (min(ids) >= 0 and max(ids) < vocab_size)):
        raise fields.wrong("tokens", f"must be token ids between 0 and {vocab_size - 1}")
    return ids
