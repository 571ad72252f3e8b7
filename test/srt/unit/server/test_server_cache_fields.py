"""cache_salt, pin_seconds and checkpoint of a body: what arrives, and what is refused."""

from __future__ import annotations

import pytest
from server_harness import run, says, serving

from mamba_eagle.message import Generate

ASKED = {"cache_salt": "team é", "pin_seconds": 30, "checkpoint": [3, 1, 3]}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_hints_reach_the_scheduler(path: str) -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            name = "text" if path == "/generate" else "prompt"
            assert (await server.post(path, **{name: "hello"}, **ASKED)).status_code == 200
            assert (await server.post(path, **{name: "hello"})).status_code == 200
            sent = [item for item in server.engine.received if isinstance(item, Generate)]
            hints = [(each.salt, each.pin_seconds, each.checkpoints) for each in sent]
            assert hints == [("team é", 30.0, [1, 3]), ("", 0.0, [])]

    run(test())


@pytest.mark.parametrize(
    "field, value, remedy",
    [
        ("cache_salt", "x" * 257, "at most 256 characters"),
        ("cache_salt", 7, "must be a string"),
        ("pin_seconds", -1, "must be 0 to 3600"),
        ("pin_seconds", 3601, "must be 0 to 3600"),
        ("checkpoint", [1] * 17, "16"),
        ("checkpoint", [0], "between 1 and 4: the prompt has 5 tokens"),
        ("checkpoint", [5], "between 1 and 4: the prompt has 5 tokens"),
        ("checkpoint", 3, "must be a list of integers"),
    ],
)
def test_what_is_refused(field: str, value: object, remedy: str) -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            reply = await server.post("/generate", text="hello", **{field: value})
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert message.startswith(field) and remedy in message
            assert len(message) < 500

    run(test())
