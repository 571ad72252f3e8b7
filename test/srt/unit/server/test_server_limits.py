"""Each limit is checked before the work that it bounds, and its error names it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import string
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import Harness, listening, run, says, serving, silent
from tiny_tokenizer import byte_level

from mamba_eagle import limits
from mamba_eagle.message import Abort, Generate
from mamba_eagle.server.bodies.kinds import refuse_half_pairs
from mamba_eagle.server.bodies.prompts import CHARACTERS_PER_TOKEN
from mamba_eagle.server.bodies.reception import SMALL_BODY
from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.text import BATCH_CHARACTERS, BATCH_TEXTS

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
LONG_NAME = "n" * (limits.MAX_MODEL_LENGTH + 1)
MANY_STOPS = [f"s{i}" for i in range(limits.MAX_STOP_STRINGS + 1)]
BIAS = {str(i): 0.5 for i in range(limits.MAX_LOGIT_BIAS_ENTRIES + 1)}


def sampling(**values: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": values}


# route, body, what the message must name: field, size, limit
OVER: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/generate", {"text": ["a"] * 4097}, ["text: 4097 prompts", "4096"]),
    ("/generate", {"input_ids": [[1]] * 4097}, ["input_ids: 4097 prompts", "4096"]),
    ("/v1/completions", {"prompt": ["a"] * 4097}, ["prompt: 4097 prompts", "4096"]),
    ("/v1/completions", {"prompt": [[1]] * 4097}, ["prompt: 4097 prompts", "4096"]),
    ("/v1/chat/completions", {"messages": [{}] * 4097}, ["messages: 4097 messages", "4096"]),
    ("/tokenize", {"prompt": ["a"] * 4097}, ["prompt: 4097 texts", "4096"]),
    ("/detokenize", {"tokens": [[1]] * 4097}, ["tokens: 4097 lists", "4096"]),
    ("/detokenize", {"tokens": [1] * (2**20 + 1)}, ["tokens: 1048577 token ids", "1048576"]),
    ("/detokenize", {"tokens": [[1] * 2**19] * 3}, ["tokens: 1572864 token ids", "1048576"]),
    ("/generate", sampling(stop=MANY_STOPS), ["sampling_params.stop: 513 stop strings", "512"]),
    ("/v1/completions", {**PROMPT, "stop": MANY_STOPS}, ["stop: 513 stop strings", "512"]),
    ("/generate", sampling(stop="x" * 1025), ["stop = ", "1025 characters", "1024"]),
    (
        "/generate",
        sampling(stop=[f"{i:033}" for i in range(512)]),
        ["stop: 16896 characters of stop strings", "16384"],
    ),
    (
        "/generate",
        {"text": ["a"] * 2, "sampling_params": [{"stop": [c * 1000] * 9} for c in "ab"]},
        ["sampling_params: 18000 characters of different stop strings", "16384"],
    ),
    ("/generate", sampling(stop_token_ids=[1] * 1025), ["stop_token_ids: 1025 token ids", "1024"]),
    ("/generate", sampling(logit_bias=BIAS), ["logit_bias: 4097 entries", "4096"]),
    ("/v1/chat/completions", {**CHAT, "logit_bias": BIAS}, ["logit_bias: 4097 entries", "4096"]),
    ("/generate", sampling(n=1025), ["sampling_params.n = 1025", "1024"]),
    ("/generate", {"text": "a", "rid": "r" * 257}, ["rid = ", "257 characters", "256"]),
    ("/generate", {"text": ["a"], "rid": ["r" * 257]}, ["rid[0] = ", "257 characters", "256"]),
    ("/v1/completions", {**PROMPT, "rid": "r" * 257}, ["rid = ", "257 characters", "256"]),
    ("/v1/completions", {**PROMPT, "model": LONG_NAME}, ["model = ", "513 characters", "512"]),
    ("/v1/chat/completions", {**CHAT, "model": LONG_NAME}, ["model = ", "513 characters", "512"]),
    (
        "/generate",
        {"text": ["a"] * 100, "sampling_params": {"n": 100}},
        ["100 prompts", "10000 samples", "4104", "--max-queued-requests"],
    ),
    ("/v1/completions", {"prompt": ["a"] * 5, "n": 1000}, ["5 prompts", "5000 samples", "4104"]),
    (
        "/generate",
        sampling(n=1024, logit_bias={str(i): 0.5 for i in range(280)}),
        ["logit_bias, stop_token_ids", "286720 entries", "262144"],
    ),
    (
        "/generate",
        {
            "text": "a",
            "return_logprob": True,
            "top_logprobs_num": 64,
            "sampling_params": {"n": 700},
        },
        ["top_logprobs_num", "2866500 logprobs", "2097152", "max_new_tokens or n"],
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 64, "n": 1024, "max_completion_tokens": 50},
        ["top_logprobs", "logprobs", "2097152", "max_completion_tokens or n"],
    ),
]


def check(reply: Any, parts: list[str], status: int = 400) -> None:
    assert reply.status_code == status, reply.text[:500]
    message = reply.json()["error"]["message"]
    assert len(message) < 1000
    for part in parts:
        assert part in message, message


def test_more_than_allowed_is_refused_by_name() -> None:
    async def test() -> None:
        async with serving(says("x"), max_queued_requests=4096) as server:
            for path, body, parts in OVER:
                check(await server.client.post(path, json=body), parts)
            assert server.engine.received == [] and server.manager.num_live == 0

    run(test())


def test_products_with_the_context_are_bounded() -> None:
    """Where prompts may be long: each sample carries its own, each position has logprobs."""
    ids = [5] * 50_000

    async def test() -> None:
        async with serving(says("x"), context_length=100_000) as server:
            body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"n": 100}}
            parts = ["n: 1 prompts", "5000000 tokens", "4194304"]
            check(await server.post("/generate", **body), parts)
            logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, **logprobs}
            parts = ["50000 positions", "300000", "131072", "logprob_start_len"]
            check(await server.post("/generate", **body), parts)
            traced = sampling(n=2, max_new_tokens=99_000) | {"return_spec_trace": True}
            parts = ["return_spec_trace", "198000 tokens", "131072", "max_new_tokens or n"]
            check(await server.post("/generate", **traced), parts)
            assert server.engine.received == []
            body |= {"logprob_start_len": 49_000}
            assert (await server.post("/generate", **body)).status_code == 200
            chat = {**CHAT, "n": 2, "return_spec_trace": True}
            assert (await server.post("/v1/chat/completions", **chat)).status_code == 200
            assert server.engine.of(Generate)[-1].sampling.max_new_tokens == 131_072 // 2

    run(test())


def test_just_as_much_as_allowed_is_served() -> None:
    async def test() -> None:
        async with serving(says("xyz"), max_queued_requests=4096) as server:
            body = {
                "text": "a",
                "rid": "r" * limits.MAX_RID_LENGTH,
                "sampling_params": {
                    "n": 40,
                    "stop": [f"{i:032}" for i in range(511)] + ["y"],
                    "logit_bias": {str(i): 0.5 for i in range(300)},
                    "max_new_tokens": 3,
                },
            }
            replies = (await server.post("/generate", **body)).json()
            assert [reply["text"] for reply in replies] == ["x"] * 40
            text = ["a"] * limits.MAX_PROMPTS
            assert (await server.post("/tokenize", prompt=text)).json()["count"][-1] == 1
            ids = [100] * limits.MAX_DETOKENIZED_IDS
            reply = await server.post("/detokenize", tokens=ids)
            assert len(reply.json()["text"]) == limits.MAX_DETOKENIZED_IDS

    run(test())


# ── bodies ───────────────────────────────────────────────────────────────────────────────────


def test_bodies_are_bounded_by_route_and_setting() -> None:
    async def test() -> None:
        async with serving(says("x"), max_body_size=1) as server:
            for path, size, limit in (
                ("/generate", 2**20 + 1, "1 MiB, --max-body-size"),
                ("/tokenize", 2**20 + 1, "1 MiB, --max-body-size"),
                ("/abort_request", 2**16 + 1, "64 KiB, the limit of this route"),
            ):
                reply = await server.client.post(path, content=b" " * size)
                check(reply, [limit], 413)
            body = b" " * (2**20 - 20) + b'{"text":"a"}'
            assert (await server.client.post("/generate", content=body)).status_code == 200
            state = server.app.state.server
            assert state.bodies.held == 0

    run(test())


def test_bodies_held_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of clients that send slowly count, too, until they have left."""

    async def slow(go_on: asyncio.Event) -> AsyncIterator[bytes]:
        yield b'{"text":"' + b"a" * 40_000
        await go_on.wait()
        yield b'"}'

    async def test() -> None:
        async with serving(says("x")) as server, listening(server.app) as client:
            bodies = server.app.state.server.bodies
            bodies.capacity = 100_000
            go_on = asyncio.Event()
            open_ones = [
                asyncio.ensure_future(client.post("/generate", content=slow(go_on)))
                for _ in range(2)
            ]
            while bodies.held < 80_000:
                await asyncio.sleep(0.005)
            reply = await client.post("/generate", content=b" " * 30_000)
            check(reply, ["request bodies", "try again"], 503)
            assert reply.headers["Retry-After"] == "1"
            assert (await client.post("/generate", json={"text": "a"})).status_code == 200
            open_ones[0].cancel()
            while bodies.held > 50_000:
                await asyncio.sleep(0.005)
            go_on.set()
            assert (await open_ones[1]).status_code == 400  # longer than the context
            while bodies.held:
                await asyncio.sleep(0.005)

    run(test())


@pytest.mark.parametrize(
    "headers, names",
    [
        ({"Content-Encoding": "gzip"}, "Content-Encoding"),
        ({"Content-Encoding": "br"}, "Content-Encoding"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, "Content-Type"),
        ({"Content-Type": "application/xml"}, "Content-Type"),
        ({"Content-Type": "application/json; charset=utf-16"}, "Content-Type"),
    ],
)
def test_what_is_not_json_as_it_is_is_415(headers: dict[str, str], names: str) -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            body = gzip.compress(b'{"text":"a"}')
            for path in ("/generate", "/v1/completions", "/tokenize", "/abort_request"):
                reply = await server.client.post(path, content=body, headers=headers)
                check(reply, [names], 415)

    run(test())


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "application/json; charset=UTF-8",
        "application/vnd.api+json",
        "text/plain",
        "application/x-www-form-urlencoded",  # what curl -d says
    ],
)
def test_json_goes_by_several_names(kind: str) -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            headers = {"Content-Type": kind, "Content-Encoding": "identity"}
            reply = await server.client.post("/generate", content=b'{"text":"a"}', headers=headers)
            assert reply.status_code == 200

    run(test())


# ── long bodies are read in threads ──────────────────────────────────────────────────────────


async def same_wherever_it_is_read(server: Harness, path: str, body: dict[str, Any]) -> None:
    """Spaces make it longer, so that it is read on the loop, then in either kind of thread."""
    text = json.dumps(body)
    replies = []
    for size in (0, SMALL_BODY, 2**18):
        reply = await server.client.post(path, content=text + " " * size)
        value = reply.json()
        if "meta_info" in value:
            value["meta_info"] = value["meta_info"]["prompt_tokens"]
        for name in ("id", "created"):
            value.pop(name, None)
        replies.append((reply.status_code, value))
    assert replies[0] == replies[1] == replies[2]


def test_where_a_body_is_read_changes_nothing() -> None:
    async def test() -> None:
        async with serving(says("xy")) as server:
            for path, body in (
                ("/generate", {"text": "abc", "sampling_params": {"stop": "y"}}),
                ("/generate", {"input_ids": [1, 999]}),
                ("/v1/completions", {"prompt": ["a", "b"], "echo": True}),
                ("/v1/chat/completions", CHAT),
                ("/tokenize", {"prompt": ["abc", ""]}),
                ("/detokenize", {"tokens": [[70, 71], [72]]}),
                ("/generate", {"text": "x" * 100}),
            ):
                await same_wherever_it_is_read(server, path, body)

    run(test())


def test_batches_of_texts_encode_as_each_alone() -> None:
    tokenizer = byte_level(("Question", " the"))
    texts = [f"Question {i} the é" * (i % 7) for i in range(3 * BATCH_TEXTS)]
    texts[5] = "Question" * BATCH_CHARACTERS
    assert tokenizer.encode_all(texts) == [
        tokenizer.hf.encode(text, add_special_tokens=True) for text in texts
    ]
    assert tokenizer.encode_all([]) == []


def test_texts_are_refused_by_their_length_only_if_they_cannot_fit() -> None:
    """Long tokens: a text of many characters for each token that fits is encoded."""
    word = string.ascii_letters[: 4 * CHARACTERS_PER_TOKEN]
    tokenizer = byte_level((word,))

    async def test() -> None:
        async with serving(says("x"), tokenizer=tokenizer, vocab_size=400) as server:
            assert (await server.post("/generate", text=word * 60)).status_code == 200
            check(await server.post("/generate", text=word * 64), ["64 tokens", "63 fit"])
            check(await server.post("/generate", text="z" * 2000), ["2000 characters", "63"])

    run(test())


# ── many samples ─────────────────────────────────────────────────────────────────────────────


def test_many_samples_are_sent_and_ended_in_turns() -> None:
    def script(request: Generate) -> Any:
        return None if request.rid.startswith("many") else says("ok")(request)

    async def test() -> None:
        async with serving(script, max_queued_requests=4096) as server:
            body = {"text": "a", "rid": "many", "sampling_params": {"n": 500}}
            task = asyncio.ensure_future(server.post("/generate", **body))
            while server.manager.num_live < 500:
                await asyncio.sleep(0)
            first = len(server.manager._unsent)
            assert first > 400
            # Another request does not wait for them.
            assert (await server.post("/generate", text="b")).json()["text"] == "ok"
            reply = await server.post("/abort_request", rid="many")
            assert reply.json() == {"aborted": 500}
            assert {one["meta_info"]["finish_reason"]["type"] for one in (await task).json()} == {
                "abort"
            }
            assert server.manager.num_live == 0

    run(test())


def test_samples_that_were_ended_before_their_turn_never_reach_the_engine() -> None:
    async def test() -> None:
        async with serving(silent, max_queued_requests=4096) as server:
            body = {"text": "a", "rid": "many", "sampling_params": {"n": 1000}}
            task = asyncio.ensure_future(server.post("/generate", **body))
            while not server.manager.num_live:
                await asyncio.sleep(0)
            await server.post("/abort_request", rid="many")
            await task
            while server.manager._unsent:
                await asyncio.sleep(0.01)
            await server.all_heard()
            sent = {item.rid for item in server.engine.of(Generate)}
            assert len(sent) < 1000
            ended = {item.rid for item in server.engine.wait_for(Abort, len(sent))}
            assert ended == sent

    run(test())


def test_a_long_name_is_not_copied_for_each_value_in_it() -> None:
    metadata = {"a": {"x" * 100_000: ["y"] * 1000}}
    tracemalloc.start()
    try:
        refuse_half_pairs(metadata)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    metadata["a"]["x" * 100_000][7] = "\ud800"
    with pytest.raises(RequestError) as raised:
        refuse_half_pairs(metadata)
    assert str(raised.value).startswith("a.xxx") and len(str(raised.value)) < 400


def test_every_limit_is_in_the_docs() -> None:
    """With its value, in the first two columns of a table."""
    page = (Path(__file__).parents[4] / "docs" / "limits.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^| ]+) \|", page, re.MULTILINE))
    documented = {name: float(value.replace(",", "")) for name, value in rows.items()}
    values = {name: float(value) for name, value in vars(limits).items() if name.isupper()}
    assert documented == values


def test_names_to_be_aborted_are_looked_for_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mamba_eagle.server.apis.sse.TURN_SECONDS", 0.0)
    asked: list[str | None] = []
    seen: list[int] = []

    async def abort(name: str | None) -> int:
        if not asked:
            asyncio.get_running_loop().call_soon(lambda: seen.append(len(asked)))
        asked.append(name)
        return 0

    async def test() -> None:
        async with serving(silent) as server:
            monkeypatch.setattr(server.manager, "abort", abort)
            names = [str(number) for number in range(1000)]
            reply = await server.post("/abort_requests", request_ids=names)
            assert reply.json() == {"status": "aborted", "aborted": 0}
            assert asked == names and seen[0] < 1000

    run(test())
