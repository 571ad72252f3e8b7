"""The tokenizer alone: /tokenize, /detokenize and /tokenizer_info."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_DETOKENIZED_IDS, MAX_PROMPTS
from mamba_eagle.server.apis.openai.chat_body import Rendered, render_chat
from mamba_eagle.server.apis.sse import JsonList
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Body, Flag, needs, read, says, takes
from mamba_eagle.server.bodies.prompts import limit_prompts
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState, State

TEXTS = kinds.texts("texts", MAX_PROMPTS)
IDS_OF_TEXT = kinds.integers("token ids", MAX_DETOKENIZED_IDS)
TOKENS = kinds.untouched(kinds.ID_LISTS, "must be token ids, or a list of such")


class TokenizeBody(Rendered):
    """prompt or messages."""

    HARMLESS = frozenset(("model",))

    prompt: Annotated[list[str] | None, TEXTS] = says("a text, or a list of texts")
    text: Annotated[list[str] | None, TEXTS] = says("as prompt")
    add_special_tokens: Flag | None = says("as the tokenizer adds them; of messages not")


class DetokenizeBody(Body):
    """Token ids."""

    HARMLESS = frozenset(("model",))  # one tokenizer is served

    tokens: Annotated[Any, TOKENS] = needs("token ids, or a list of such")
    skip_special_tokens: Flag = says("leave special tokens out of the text", True)


router = APIRouter()
PIECE = 8192  # token ids put into JSON at a time


@router.post("/v1/tokenize", openapi_extra=takes(TokenizeBody))
@router.post("/tokenize", openapi_extra=takes(TokenizeBody))
async def tokenize(request: Request, state: State) -> Response:
    """``prompt`` (or ``text``), a string or a list of strings, or a chat's ``messages`` with all
    that its template is given, to token ids."""
    # In a thread, as chats are: a template may take long.
    return json_response(await state.read(request, _tokenize, is_chat=True))


@router.post("/v1/detokenize", openapi_extra=takes(DetokenizeBody))
@router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request, state: State) -> Response:
    """``tokens``, a list of ids or a list of such lists, to text."""
    return json_response(await state.read(request, _detokenize))


@router.api_route("/tokenizer_info", methods=["GET", "HEAD"])
async def tokenizer_info(state: State) -> Response:
    """What evaluators need to know of the tokenizer: special tokens, and the chat template that
    this server renders with."""
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


def _tokenize(values: dict[str, Any], state: ServerState) -> bytes:
    body = read(TokenizeBody, values)
    if body.messages is not None:
        return _answer([_chat_ids(body, state)], True, state)
    name = "prompt" if body.prompt is not None else "text"
    given = body.text if body.prompt is None else body.prompt
    if given is None:
        raise RequestError(
            "prompt is needed: a string or a list of strings; or messages", param="prompt"
        )
    special = body.add_special_tokens is not False
    single = isinstance(values[name], str)
    names = [name if single else f"{name}[{i}]" for i in range(len(given))]
    return _answer(state.prompts.encode(given, names, special), single, state)


def _answer(ids: list[list[int]], single: bool, state: ServerState) -> bytes:
    tokens = [_as_json(one) for one in ids]
    return msgspec.json.encode(
        {
            "tokens": tokens[0] if single else tokens,
            "count": len(ids[0]) if single else [len(one) for one in ids],
            "max_model_len": state.context_length,
        }
    )


def _chat_ids(body: TokenizeBody, state: ServerState) -> list[int]:
    """Token ids of the prompt that /v1/chat/completions makes of the same body."""
    for name in ("prompt", "text"):
        if (given := getattr(body, name)) is not None:
            remedy = "messages are given as well: send one of the two"
            raise RequestError.about(name, given, remedy)
    state.prompts.need_tokenizer("/tokenize")
    _, _, text = render_chat(body, state)
    # The template writes the special tokens itself.
    (ids,) = state.prompts.encode([text], ["messages"], bool(body.add_special_tokens))
    return ids


def _as_json(ids: list[int]) -> msgspec.Raw:
    text = JsonList()
    for begin in range(0, len(ids), PIECE):
        text.extend(ids[begin : begin + PIECE])
    return text.raw()


def _detokenize(values: dict[str, Any], state: ServerState) -> bytes:
    tokenizer = state.prompts.need_tokenizer("/detokenize")
    body = read(DetokenizeBody, values)
    value = body.tokens
    single = not (isinstance(value, list) and value and isinstance(value[0], list))
    lists: list[Any] = [value] if single else value
    limit_prompts(lists, "tokens", "lists")
    total = sum(len(one) for one in lists if isinstance(one, list))
    if total > MAX_DETOKENIZED_IDS:
        wrong = kinds.TooMany("token ids", total, MAX_DETOKENIZED_IDS)
        raise RequestError(f"tokens: {wrong}", param="tokens")
    last = state.vocab_size - 1
    checked = [IDS_OF_TEXT.take(one, "tokens") for one in lists]
    if any(ids and not (min(ids) >= 0 and max(ids) <= last) for ids in checked):
        raise RequestError.about("tokens", value, f"must be token ids between 0 and {last}")
    made = tokenizer.decode_all(checked, body.skip_special_tokens)
    text = made[0] if single else made
    # SGLang's clients read "text", vLLM's and lm-eval "prompt".
    return msgspec.json.encode({"text": text, "prompt": text})
