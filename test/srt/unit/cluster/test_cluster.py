"""What a replica passes on, and what a router compares. Ray itself is not needed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_harness import listening, run, says, serving, silent

from mamba_eagle.cluster.prompts import MAX_COMPARED, prompt_of
from mamba_eagle.cluster.replica import Forwarded, Head, end_to_end, forward


def posted(path: str, **body: Any) -> Forwarded:
    headers = [("content-type", "application/json"), ("x-request-id", "abc")]
    return Forwarded("", "POST", path, headers, json.dumps(body).encode())


def test_a_reply_passes_as_it_is() -> None:
    async def test() -> None:
        async with serving(says("hello")) as server, listening(server.app) as client:
            head, *pieces = [part async for part in forward(client, posted("/generate", text="a"))]
            assert isinstance(head, Head) and head.status == 200
            assert ("x-request-id", "abc") in head.headers
            assert json.loads(b"".join(pieces))["text"] == "hello"
            head, *pieces = [part async for part in forward(client, posted("/generate", text=1))]
            assert head.status == 400
            assert b"text = 1" in b"".join(pieces)

    run(test())


def test_a_stream_comes_in_pieces_and_leaving_it_ends_the_request() -> None:
    async def test() -> None:
        settings = {"sse_keep_alive": 0.02}
        async with serving(silent, **settings) as server, listening(server.app) as client:
            parts = forward(client, posted("/generate", text="a", stream=True))
            assert isinstance(await anext(parts), Head)
            assert await anext(parts)  # a comment, while nothing else is there
            assert server.manager.num_live == 1
            await parts.aclose()
            while server.manager.num_live:
                await asyncio.sleep(0.005)

    run(test())


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"text": "one"}, "one"),
        ({"prompt": ["one", "two"]}, "one"),
        ({"input_ids": [1, 2]}, "[1, 2]"),
        ({"messages": [{"role": "user", "content": "hi"}, 7]}, "user: hi"),
        ({"text": "x" * 10**6}, "x" * MAX_COMPARED),
        ({"rid": "a"}, ""),
        ([], ""),
    ],
)
def test_what_a_router_compares(body: Any, prompt: str) -> None:
    assert prompt_of(json.dumps(body).encode()) == prompt


def test_a_broken_body_is_left_to_the_server() -> None:
    assert prompt_of(b"{") == ""
    assert end_to_end([("Host", "a"), ("Content-Length", "3"), ("Accept", "b")]) == [
        ("Accept", "b")
    ]
