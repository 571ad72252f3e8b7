"""What a replica passes on, what routers compare, how one decides. Ray itself is not needed."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from server_harness import listening, run, says, serving, silent
from starlette.requests import Request

from mamba_eagle.cluster import replica
from mamba_eagle.cluster.prompts import MAX_COMPARED, RENDERED, prompt_of, to_tokenize
from mamba_eagle.cluster.replica import Forwarded, Head, end_to_end, forward
from mamba_eagle.cluster.scores import CLOSE, IMBALANCE, Scores
from mamba_eagle.server.apis.openai.chat_body import Rendered


def posted(path: str, **body: Any) -> Forwarded:
    headers = [("content-type", "application/json"), ("x-request-id", "abc")]
    headers += [("user-agent", "caf\xc3\xa9")]  # bytes of UTF-8, as an ingress has them
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


def test_a_replica_asks_its_server_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(says("hello")) as server, listening(server.app) as client:
            monkeypatch.setattr(replica, "free_port", lambda: client.base_url.port)
            running = Mock(**{"poll.return_value": None})
            monkeypatch.setattr(replica.subprocess, "Popen", lambda *_, **__: running)
            for name in ("http_proxy", "all_proxy"):
                monkeypatch.setenv(name, "http://127.0.0.1:1")
            child = replica.ServerChild([])
            await child.check_health()
            await child.client.aclose()

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


class Parts:
    """Of a reply whose head comes, if there is one; the handle that gives them, too."""

    def __init__(self, head: Head | None = None) -> None:
        self.head, self.asked, self.cancelled = head, asyncio.Event(), False

    def options(self, *_: Any, **__: Any) -> Parts:
        return self

    remote = options

    async def __anext__(self) -> Head:
        self.asked.set()
        return self.head or await asyncio.Future()

    def cancel(self) -> None:
        self.cancelled = True


def ingress_asked(parts: Parts) -> Any:
    ray_serve = pytest.importorskip("mamba_eagle.cluster.ray_serve", reason="needs [ray]")
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    body = {"type": "http.request", "body": b"{}"}
    return ray_serve.Ingress(parts)(Request(scope, AsyncMock(return_value=body)))


def test_leaving_before_the_reply_begins_ends_the_request() -> None:
    async def test() -> None:
        parts = Parts()
        replying = asyncio.ensure_future(ingress_asked(parts))
        await parts.asked.wait()
        replying.cancel()
        await asyncio.wait([replying])
        assert replying.cancelled() and parts.cancelled

    asyncio.run(test())


def test_no_header_of_rays_proxy_comes_twice() -> None:
    given = [
        ("date", "1"),
        ("server", "1"),
        ("x-request-id", "1"),
        ("content-type", "1"),
        ("x", "\xe9"),
    ]

    async def test() -> None:
        reply = await ingress_asked(Parts(Head(503, given)))
        assert reply.raw_headers == [(b"content-type", b"1"), (b"x", b"\xe9")]

    asyncio.run(test())


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
    for body in (b"{", b"[" * 100_000):
        assert prompt_of(body) == ""
    assert end_to_end([("Host", "a"), ("Content-Length", "3"), ("Accept", "b")]) == [
        ("Accept", "b")
    ]


CHAT = [{"role": "user", "content": "hello there"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "one and two"}),
        ("/generate", {"input_ids": [5, 6, 7]}),
        ("/v1/completions", {"model": "m", "prompt": ["one", "two"]}),
        ("/v1/completions", {"model": "m", "prompt": [[5, 6, 7], [8]]}),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": CHAT, "max_tokens": 3, "stream": False},
        ),
    ],
)
def test_a_router_by_events_sees_the_tokens_that_the_engine_gets(path: str, body: Any) -> None:
    async def test() -> None:
        got = []

        def script(request: Any) -> Any:
            got.append(request.token_ids)
            return says("hello")(request)

        async with serving(script, served_model_name="m") as server:
            asked = to_tokenize(path, json.dumps(body).encode())
            if isinstance(asked, dict):
                reply = await server.post("/tokenize", **asked)
                assert reply.status_code == 200, reply.text
                asked = reply.json()["tokens"]
            assert (await server.post(path, **body)).status_code == 200
            assert list(got[0]) == asked

    run(test())


def test_what_makes_a_chats_prompt_is_what_the_tokenizer_takes() -> None:
    assert Rendered.model_fields.keys() == RENDERED


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "hi"}), ("/health", {}), ("/generate", {"text": 1}), ("/", [])],
)
def test_without_tokens_a_request_goes_by_load(path: str, body: Any) -> None:
    assert to_tokenize(path, json.dumps(body).encode()) == []


def test_a_replica_is_chosen_by_its_cache_against_its_load() -> None:
    ranked = Scores().ranked
    assert ranked({"a": 16, "b": 32}, 100, {"a": 0, "b": 0}) == ["b", "a"]
    assert ranked({"b": 32}, 100, {"a": 50, "b": 49 + IMBALANCE}) == ["b", "a"]
    assert ranked({"b": 32}, 100, {"a": 50, "b": 51 + IMBALANCE}) == ["a", "b"]
    halfway = {"a": 0, "b": IMBALANCE // 2 + 1}
    assert ranked({"a": 16, "b": 32}, 100, halfway) == ["a", "b"], "half of it is here, too"
    assert ranked({"b": 32}, 1000, {"a": 0, "b": CLOSE}) == ["a", "b"], "too little to bind it"
    assert ranked({}, 0, {"a": 2 * CLOSE, "b": 0, "c": CLOSE}) == ["b", "c", "a"]
    assert ranked({}, 100, {}) == []


def test_new_prompts_take_turns_whatever_old_ones_do() -> None:
    scores, first = Scores(), []
    for turn in range(6):
        load = {"a": 0, "b": turn % CLOSE, "c": 0}
        first += scores.ranked({}, 100, load)[:1]
        scores.ranked({"a": 64}, 100, load)
    assert sorted(first[:3]) == sorted(first[3:]) == ["a", "b", "c"]
