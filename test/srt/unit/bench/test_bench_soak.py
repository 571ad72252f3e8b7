"""A soak must notice what it is there to notice."""

from __future__ import annotations

import asyncio
import json
from unittest import mock

import httpx
import pytest

from benchmark.lib import soak as soaks
from benchmark.lib.client import StreamClient
from benchmark.lib.soak import Load, Soak

IDLE = {
    "num_running_reqs": 0,
    "num_queue_reqs": 0,
    "num_free_kv_slots": 60,
    "num_cached_tokens": 40,
    "num_free_checkpoints": 5,
    "num_cached_checkpoints": 3,
    "max_mamba_cache_size": 8,
}


class Clock:
    """Goes on by a second whenever it is looked at, as before each request."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def run_soak(state: dict, text_of=lambda prompt, call: " #### 1") -> Soak:
    """A short soak of a scripted server whose idle state is ``state``."""
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        if request.url.path == "/server_info":
            info = {"max_total_num_tokens": 100, "internal_states": [{**IDLE, **state}]}
            return httpx.Response(200, json=info)
        if request.url.path == "/abort_request":
            return httpx.Response(200)
        calls += 1
        body = json.loads(request.content)
        meta = {"id": body["rid"], "completion_tokens": 3, "finish_reason": {"type": "stop"}}
        reply = {"text": text_of(body["text"], calls), "meta_info": meta}
        return httpx.Response(200, text=f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n")

    load = Load(
        prompts=["a", "b", "c", "d"],
        clients=4,
        seconds=100,
        abort_rate=0.3,
        max_new_tokens=8,
        stop=["Question"],
    )

    async def run() -> Soak:
        async with StreamClient("http://test", transport=httpx.MockTransport(answer)) as client:
            soak = Soak(load, client, idle_seconds=2)
            with mock.patch.object(soaks, "time", Clock()):
                await soak.run()
        return soak

    return asyncio.run(run())


def test_a_clean_server_passes() -> None:
    load = run_soak({})
    assert load.problems == []
    assert load.outcomes["finished"] > 0 and load.outcomes["disconnected"] > 0


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"num_running_reqs": 1}, "num_running_reqs is 1"),
        ({"num_queue_reqs": 2}, "num_queue_reqs is 2"),
        ({"num_free_kv_slots": 59}, "num_free_kv_slots 59"),
        ({"num_cached_checkpoints": 2}, "num_cached_checkpoints 2"),
    ],
)
def test_leaks_are_found(state: dict, problem: str) -> None:
    assert any(problem in text for text in run_soak(state).problems)


def test_changing_texts_are_found() -> None:
    load = run_soak({}, text_of=lambda prompt, call: f" #### {call}")
    assert any("differs from the first answer" in text for text in load.problems)
