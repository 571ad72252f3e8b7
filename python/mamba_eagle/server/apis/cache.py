"""GET /cache: what the prefix cache holds and what it was good for. Numbers; text for the operator
alone, since it is that of all clients.

POST /open_session and /close_session, as SGLang's: but requests that name the session come with
whole prompts, and what the last one has run stays in the cache.
"""

import uuid
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_PIN_SECONDS, MAX_RID_LENGTH, MAX_SHOWN
from mamba_eagle.message import CacheNode, CloseSession, OpenSession
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Body, count_in_address, needs, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.state import ServerState, State, answered
from mamba_eagle.tokenizer.text import TextTokenizer

MAX_NODES = 1000  # the scheduler plans no step while it collects them
DEFAULT_NODES = 50
MAX_TEXT_TOKENS = 200  # of each node
NODES = "how many nodes of the tree are listed"
TEXT = "1: with the beginning of each one's text; takes the admin key"
COUNTS = {  # by the scheduler's names
    "kv_slots": {
        "total": "max_total_num_tokens",
        "free": "num_free_kv_slots",
        "cached": "num_cached_tokens",
        "locked": "num_locked_tokens",
        "pinned": "num_pinned_tokens",
    },
    "states": {
        "total": "max_mamba_cache_size",
        "free": "num_free_checkpoints",
        "cached": "num_cached_checkpoints",
        "used": "num_used_checkpoints",
        "pinned": "num_pinned_checkpoints",
    },
    "journals": {
        "total": "max_journals",
        "free": "num_free_journals",
        "cached": "num_cached_journals",
    },
}
router = APIRouter()


@router.get("/cache", openapi_extra=takes(nodes=NODES, text=TEXT))
async def cache(request: Request, state: State) -> Response:
    """``?nodes=`` how many nodes of the tree are listed, the most recently used ones. ``?text=1``
    adds the beginning of each one's text, and takes the admin key."""
    given = request.query_params.get("nodes", str(DEFAULT_NODES))
    nodes = count_in_address("nodes", given, 0, MAX_NODES)
    with_text = _wants_text(request, state)
    reply = await state.ask(nodes, MAX_TEXT_TOKENS if with_text else 0)
    found = reply.state
    counts = {
        group: {own: int(found[name]) for own, name in names.items()}
        for group, names in COUNTS.items()
    }
    return json_response(
        {
            **counts,
            "prompt_tokens": int(found["prompt_tokens_total"]),
            "cached_tokens": int(found["cached_tokens_total"]),
            **msgspec.to_builtins(reply.cache),
            "nodes": [_shown(node, with_text, state.manager.tokenizer) for node in reply.nodes],
        }
    )


def _wants_text(request: Request, state: ServerState) -> bool:
    """Raises: RequestError 401 or 403 unless it comes from the operator."""
    given = request.query_params.get("text", "0")
    if given not in ("0", "1"):
        raise RequestError.about("text", given, "must be 0 or 1")
    if given == "0":
        return False
    # It shows what other clients have sent.
    need_admin(request, state.config, "text = 1", by_default=False)
    return True


def _shown(node: CacheNode, with_text: bool, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(node)
    token_ids = fields.pop("token_ids")
    if with_text and tokenizer is not None:
        fields["text"] = tokenizer.decode(token_ids, skip_special_tokens=False)[:MAX_SHOWN]
    elif with_text:
        fields["token_ids"] = token_ids
    return fields


SECONDS = kinds.number(
    0, MAX_PIN_SECONDS, above=0, must=f"must be above 0 and at most {MAX_PIN_SECONDS}"
)
NAME = kinds.short(MAX_RID_LENGTH)


class OpenBody(Body):
    """A session, which ends by itself when no request names it for a while."""

    session_id: Annotated[str, NAME] = says("its name; left out: one that no one guesses", "")
    timeout: Annotated[float, SECONDS] = says(
        "seconds without a request after which it ends", 300.0
    )

    HARMLESS = frozenset(("capacity_of_str_len", "streaming"))  # the cache has no such limits


class CloseBody(Body):
    """Which session ends."""

    session_id: Annotated[str, NAME] = needs("its name")


@router.post("/open_session", openapi_extra=takes(OpenBody))
async def open_session(request: Request, state: State) -> Response:
    """Answers with the session's name."""
    body = await state.read_control(request, OpenBody)
    name = body.session_id or uuid.uuid4().hex
    await answered(state.manager.ask(OpenSession(name=name, seconds=body.timeout), 30.0))
    return json_response(name)


@router.post("/close_session", openapi_extra=takes(CloseBody))
async def close_session(request: Request, state: State) -> Response:
    """What it has in the cache is evicted like everything else from now on."""
    body = await state.read_control(request, CloseBody)
    await answered(state.manager.ask(CloseSession(name=body.session_id), 30.0))
    return json_response({"success": True})
