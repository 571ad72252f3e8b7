"""GET /cache: what the prefix cache holds and what it was good for. Numbers; text for the operator
alone, since it is that of all clients."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_SHOWN
from mamba_eagle.message import CacheNode, GetState
from mamba_eagle.server.bodies.model import takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.state import heard, server_state
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
async def cache(request: Request) -> Response:
    """``?nodes=`` how many nodes of the tree are listed, the most recently used ones. ``?text=1``
    adds the beginning of each one's text, and takes the admin key."""
    given = request.query_params.get("nodes", str(DEFAULT_NODES))
    if not (given.isascii() and given.isdigit() and int(given[:9]) <= MAX_NODES):
        raise RequestError(f"nodes = {shown(given)}: must be 0 to {MAX_NODES}", param="nodes")
    with_text = _wants_text(request)
    manager = server_state(request).manager
    asked = GetState(max_nodes=int(given), max_tokens=MAX_TEXT_TOKENS if with_text else 0)
    reply = await heard(manager.ask(asked, 5.0), "the scheduler does not answer")
    state = reply.state
    counts = {
        group: {own: int(state[name]) for own, name in names.items()}
        for group, names in COUNTS.items()
    }
    return json_response(
        {
            **counts,
            "prompt_tokens": int(state["prompt_tokens_total"]),
            "cached_tokens": int(state["cached_tokens_total"]),
            **msgspec.to_builtins(reply.cache),
            "nodes": [_shown(node, with_text, manager.tokenizer) for node in reply.nodes],
        }
    )


def _wants_text(request: Request) -> bool:
    """Raises: RequestError 401 or 403 unless it comes from the operator."""
    given = request.query_params.get("text", "0")
    if given not in ("0", "1"):
        raise RequestError(f"text = {shown(given)}: must be 0 or 1", param="text")
    if given == "0":
        return False
    # It shows what other clients have sent.
    need_admin(request, server_state(request).config, "text = 1", by_default=False)
    return True


def _shown(node: CacheNode, with_text: bool, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(node)
    token_ids = fields.pop("token_ids")
    if with_text and tokenizer is not None:
        fields["text"] = tokenizer.decode(token_ids, skip_special_tokens=False)[:MAX_SHOWN]
    elif with_text:
        fields["token_ids"] = token_ids
    return fields
