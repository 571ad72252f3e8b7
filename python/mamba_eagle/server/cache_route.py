"""GET /cache: what the prefix cache holds and what it was good for. Numbers, no text."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from mamba_eagle.core import shown
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import server_state
from mamba_eagle.tokenizer.manager import EngineDead

MAX_NODES = 1000  # the scheduler plans no step while it collects them
DEFAULT_NODES = 50
router = APIRouter()


@router.get("/cache")
async def cache(request: Request) -> Response:
    """``?nodes=`` how many nodes of the tree are listed, the most recently used ones."""
    given = request.query_params.get("nodes", str(DEFAULT_NODES))
    if not (given.isascii() and given.isdigit() and int(given[:9]) <= MAX_NODES):
        raise RequestError(f"nodes = {shown(given)}: must be 0 to {MAX_NODES}", param="nodes")
    try:
        reply = await server_state(request).manager.cache(int(given))
    except (EngineDead, asyncio.TimeoutError) as error:
        raise RequestError(str(error) or "the scheduler does not answer", 503) from None
    state = {name: int(value) for name, value in reply.state.items() if name in COUNTS}
    return json_response(
        {
            "kv_slots": {
                "total": state["max_total_num_tokens"],
                "free": state["num_free_kv_slots"],
                "cached": state["num_cached_tokens"],
                "locked": state["num_locked_tokens"],
                "pinned": state["num_pinned_tokens"],
            },
            "states": {
                "total": state["max_mamba_cache_size"],
                "free": state["num_free_checkpoints"],
                "cached": state["num_cached_checkpoints"],
                "used": state["num_used_checkpoints"],
                "pinned": state["num_pinned_checkpoints"],
            },
            "prompt_tokens": state["prompt_tokens_total"],
            "cached_tokens": state["cached_tokens_total"],
            "hits": reply.cache.hits,
            "saved_tokens": reply.cache.saved_tokens,
            "evicted_states": reply.cache.evicted_states,
            "evicted_tokens": reply.cache.evicted_tokens,
            "nodes": reply.nodes,
        }
    )


COUNTS = {
    "max_total_num_tokens",
    "num_free_kv_slots",
    "num_cached_tokens",
    "num_locked_tokens",
    "num_pinned_tokens",
    "num_pinned_checkpoints",
    "max_mamba_cache_size",
    "num_free_checkpoints",
    "num_cached_checkpoints",
    "num_used_checkpoints",
    "prompt_tokens_total",
    "cached_tokens_total",
}
