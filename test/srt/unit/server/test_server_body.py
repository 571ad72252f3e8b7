"""Every bad body is refused with 400, a message that names field and value, and no harm done."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_harness import run, says, serving, silent
from tiny_tokenizer import spell

OK = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}


def params(**values: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling_params": values}


# body -> what the message must contain
BAD: list[tuple[Any, list[str]]] = [
    ({}, ["text or input_ids is needed"]),
    ({"text": None}, ["text or input_ids is needed"]),
    ({"text": "a", "input_ids": [1]}, ["text and input_ids are both given"]),
    ({"text": ""}, ['text = ""', "empty"]),
    ({"text": ["a", ""]}, ['text[1] = ""', "empty"]),
    ({"text": []}, ["text = []", "no prompt"]),
    ({"text": 5}, ["text = 5", "string"]),
    ({"text": ["a", 5]}, ["text", "5", "string"]),
    ({"input_ids": []}, ["input_ids", "empty"]),
    ({"input_ids": [[1], []]}, ["input_ids[1]", "empty"]),
    ({"input_ids": "abc"}, ['input_ids = "abc"']),
    ({"input_ids": [1, "x"]}, ['input_ids[1] = "x"', "token id"]),
    ({"input_ids": [1, True]}, ["input_ids[1] = true"]),
    ({"input_ids": [1, 300]}, ["input_ids[1] = 300", "299"]),
    ({"input_ids": [-1]}, ["input_ids[0] = -1"]),
    ({"input_ids": [[1], 2]}, ["input_ids[1] = 2"]),
    ({"input_ids": [1] * 64}, ["64 tokens", "63", "context of 64"]),
    ({"text": "x" * 100}, ["text", "100 tokens", "63"]),
    ({"text": "x" * 100_000}, ["text", "100000 characters", "63 tokens"]),
    (params(max_new_tokens="abc"), ['sampling_params.max_new_tokens = "abc"', "integer"]),
    (params(max_new_tokens=True), ["sampling_params.max_new_tokens = true", "integer"]),
    (params(max_new_tokens=1.5), ["sampling_params.max_new_tokens = 1.5", "integer"]),
    (params(max_new_tokens=10**30), ["sampling_params.max_new_tokens", "integer"]),
    (params(max_new_tokens=-1), ["sampling_params.max_new_tokens = -1", "0 or more"]),
    (params(min_new_tokens=200), ["sampling_params.min_new_tokens = 200"]),
    (params(temperature=-0.5), ["sampling_params.temperature = -0.5"]),
    (params(temperature="hot"), ['sampling_params.temperature = "hot"', "number"]),
    (params(temperature=False), ["sampling_params.temperature = false"]),
    (params(top_p=0), ["sampling_params.top_p = 0.0"]),
    (params(top_p=1.5), ["sampling_params.top_p = 1.5"]),
    (params(top_k=-2), ["sampling_params.top_k = -2"]),
    (params(min_p=2), ["sampling_params.min_p = 2.0"]),
    (params(frequency_penalty=3), ["sampling_params.frequency_penalty = 3.0"]),
    (params(repetition_penalty=0), ["sampling_params.repetition_penalty = 0.0"]),
    (params(stop=5), ["sampling_params.stop = 5", "string"]),
    (params(stop=["a", 1]), ["sampling_params.stop", "string"]),
    (params(stop=""), ["sampling_params.stop", "empty"]),
    (params(stop_token_ids=[999]), ["sampling_params.stop_token_ids", "999"]),
    (params(stop_token_ids="x"), ["sampling_params.stop_token_ids", "list of integers"]),
    (params(logit_bias={"x": 1}), ["sampling_params.logit_bias", '"x"']),
    (params(logit_bias={"5": "y"}), ["sampling_params.logit_bias"]),
    (params(logit_bias={"999": 1}), ["sampling_params.logit_bias", "299"]),
    (params(logit_bias=[1]), ["sampling_params.logit_bias = [1]"]),
    (params(ignore_eos="yes"), ['sampling_params.ignore_eos = "yes"', "true or false"]),
    (params(n=0), ["sampling_params.n = 0"]),
    (params(n="two"), ['sampling_params.n = "two"']),
    (params(sampling_seed=-3), ["sampling_params.sampling_seed = -3"]),
    (params(seed="x"), ['sampling_params.seed = "x"']),
    (params(stop_regex="x"), ["sampling_params.stop_regex", "not available"]),
    ({"text": "hi", "sampling_params": "x"}, ['sampling_params = "x"', "object"]),
    ({"text": ["a", "b"], "sampling_params": [{}]}, ["sampling_params", "1 entries for 2"]),
    ({"text": "a", "sampling_params": [5]}, ["sampling_params[0] = 5", "object"]),
    (
        {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0}]},
        ["sampling_params[1].top_p = 0.0"],
    ),
    ({**OK, "stream": "yes"}, ['stream = "yes"', "true or false"]),
    ({**OK, "rid": 5}, ["rid = 5", "string"]),
    ({**OK, "rid": ""}, ['rid = ""']),
    ({**OK, "rid": ["a"]}, ["rid", "string"]),
    ({"text": ["a", "b"], "rid": ["x"]}, ["rid", "2 strings"]),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, ["rid", "differ"]),
    ({**OK, "return_spec_trace": "yes"}, ['return_spec_trace = "yes"', "true or false"]),
    ({**OK, "return_spec_trace": [True, False]}, ["return_spec_trace", "2 entries for 1"]),
    ({"text": ["a", "b"], "return_spec_trace": [True, 7]}, ["return_spec_trace = 7"]),
    ({**OK, "return_logprob": 1}, ["return_logprob = 1"]),
    ({**OK, "return_logprob": True, "logprob_start_len": 9}, ["logprob_start_len = 9", "2"]),
    ({**OK, "return_logprob": True, "top_logprobs_num": 65}, ["top_logprobs_num = 65"]),
]

RAW: list[tuple[bytes, list[str]]] = [
    (b"{", ["not valid JSON"]),
    (b"[1]", ["must be a JSON object", "[1]"]),
    (b'"x"', ["must be a JSON object"]),
    (b"\xff\xfe", ["not valid JSON"]),
    (b'{"text": "\xff"}', ["not valid JSON"]),
    (b'{"text": "\\ud800"}', ["text"]),
    (b'{"text": "a", "sampling_params": {"temperature": NaN}}', ["temperature = NaN", "finite"]),
    (b'{"text": "a", "sampling_params": {"top_p": Infinity}}', ["top_p = Infinity", "finite"]),
    (b'{"text": "a", "sampling_params": {"min_p": 1e999}}', ["min_p"]),
    (b'{"text": ' + b"[" * 20_000, ["256 deep"]),
    (b'{"text": ' + b"[" * 100_000, ["100001 arrays and objects", "32768", "fewer"]),
]


def refused(status: int, text: str, parts: list[str]) -> None:
    assert status == 400, text
    message = json.loads(text)["error"]["message"]
    for part in parts:
        assert part in message, message


def test_every_bad_body_is_named_and_survived() -> None:
    async def test() -> None:
        async with serving(says("hello")) as server:
            for body, parts in BAD:
                reply = await server.client.post("/generate", json=body)
                refused(reply.status_code, reply.text, parts)
            for raw, parts in RAW:
                reply = await server.client.post("/generate", content=raw)
                refused(reply.status_code, reply.text, parts)
            assert server.engine.received == []  # nothing of it reached the engine
            assert (await server.post("/generate", **OK)).json()["text"] == "he"

    run(test())


@pytest.mark.parametrize(
    "path, body, parts",
    [
        ("/v1/completions", {}, ["prompt = null"]),
        ("/v1/completions", {"prompt": ""}, ["prompt", "empty"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": "x"}, ['max_tokens = "x"']),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, ["max_tokens = -1"]),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, ["temperature = -1.0"]),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, ["suffix", "tokens for filling in"]),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "n": 3}, ["best_of = 2", "n (3)"]),
        ("/v1/completions", {"prompt": "a", "best_of": 3, "stream": True}, ["best_of", "stream"]),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, ["prompt_logprobs = -1"]),
        (
            "/v1/completions",
            {"prompt": "a", "prompt_logprobs": 1, "stream": True},
            ["prompt_logprobs = 1", "stream: false"],
        ),
        (
            "/v1/completions",
            {"prompt": "a", "truncate_prompt_tokens": 0},
            ["truncate_prompt_tokens = 0", "-1"],
        ),
        ("/v1/completions", {"prompt": "a", "bad_words": [" "]}, ["bad_words", "empty"]),
        ("/v1/completions", {"prompt": "a", "bad_words": 5}, ["bad_words = 5"]),
        (
            "/generate",
            {"text": "a", "sampling_params": {"bad_words": [""]}},
            ["sampling_params.bad_words = "],
        ),
        ("/inference/v1/generate", {}, ["token_ids is needed"]),
        (
            "/v1/completions",
            {"prompt": "a", "allowed_token_ids": [300]},
            ["allowed_token_ids = [300]", "299"],
        ),
        (
            "/v1/completions",
            {"prompt": "a", "allowed_token_ids": spell("x"), "bad_words": ["x"]},
            ["allowed_token_ids", "allow others"],
        ),
        ("/v1/completions", {"prompt": "a", "token_ids_logprob": [5]}, ["/generate"]),
        ("/generate", {"text": "a", "token_ids_logprob": [5]}, ["return_logprob"]),
        (
            "/generate",
            {"text": "a", "return_logprob": True, "token_ids_logprob": [300]},
            ["token_ids_logprob = [300]", "299"],
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 99}, ["logprobs = 99"]),
        ("/v1/completions", {"prompt": ["a", 1]}, ["prompt"]),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "xml"}},
            ["response_format"],
        ),
        ("/v1/chat/completions", {}, ["messages = null"]),
        ("/v1/chat/completions", {"messages": ["x"]}, ["messages[0]", '"x"']),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, ["content = 5"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            ["tools[0].type is needed"],
        ),
        ("/tokenize", {}, ["prompt is needed"]),
        ("/detokenize", {"tokens": "x"}, ["tokens"]),
        ("/detokenize", {"tokens": [5, 999]}, ["tokens", "299"]),
        ("/abort_request", {}, ["rid"]),
        ("/abort_request", {"rid": 5}, ["rid = 5"]),
    ],
)
def test_bad_bodies_of_other_routes(path: str, body: dict[str, Any], parts: list[str]) -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            reply = await server.client.post(path, json=body)
            refused(reply.status_code, reply.text, parts)

    run(test())


def test_null_and_what_asks_for_nothing_mean_default() -> None:
    async def test() -> None:
        nulls = ["regex", "json_schema", "stop", "temperature", "n", "stop_token_ids", "logit_bias"]
        body = {
            "text": "a",
            "input_ids": None,
            "sampling_params": {**dict.fromkeys(nulls), "max_new_tokens": 3.0, "temperature": 0},
            "lora_path": None,
            "return_routed_experts": False,
            "rid": None,
            "stream": None,
        }
        async with serving(says("hello")) as server:
            assert (await server.post("/generate", **body)).json()["text"] == "hel"

    run(test())


def test_oversized_body_is_413() -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            reply = await server.client.post("/generate", content=b" " * (9 * 2**20))
            assert reply.status_code == 413
            assert "8 MiB, --max-body-size" in reply.json()["error"]["message"]

    run(test())


def test_full_queue_is_503_with_retry_after() -> None:
    async def test() -> None:
        async with serving(silent, max_queued_requests=0) as server:
            first = asyncio.ensure_future(server.post("/generate", text=["a"] * 7, rid="first"))
            while server.manager.num_live < 7:
                await asyncio.sleep(0.005)
            reply = await server.post("/generate", text=["a"] * 2)
            assert reply.status_code == 503
            assert int(reply.headers["Retry-After"]) >= 1
            await server.post("/abort_request", rid="first")
            await first

    run(test())


def test_more_samples_than_the_server_ever_holds_are_400() -> None:
    async def test() -> None:
        async with serving(silent, max_queued_requests=0) as server:
            body = {"text": ["a"] * 3, "sampling_params": {"n": 3}}
            reply = await server.post("/generate", **body)
            refused(reply.status_code, reply.text, ["3 prompts", "9 samples", "at most 8"])

    run(test())


def test_empty_lists_of_constraints_ask_for_nothing() -> None:
    async def test() -> None:
        async with serving(says("hello")) as server:
            # What sglang.lang sends with each request.
            nothing = {"stop": [], "stop_regex": [], "stop_token_ids": [], "regex": None}
            reply = await server.post("/generate", text="a", sampling_params=nothing)
            assert reply.json()["text"] == "hello"

    run(test())


def test_without_tokenizer_ids_go_in_and_out() -> None:
    async def test() -> None:
        async with serving(says("abc"), tokenizer=None) as server:
            for body in ({"text": "a"}, {"input_ids": [5], "sampling_params": {"stop": "x"}}):
                reply = await server.client.post("/generate", json=body)
                refused(reply.status_code, reply.text, ["--skip-tokenizer-init"])
            reply = await server.post("/generate", input_ids=[5])
            assert reply.json()["text"] == ""
            assert len(reply.json()["output_ids"]) == 3

    run(test())
