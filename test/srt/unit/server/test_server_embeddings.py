"""/v1/embeddings over the fake engine, whose vectors are a count and two token ids."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest
from fake_engine import length_of
from server_harness import run, serving, silent
from tiny_tokenizer import spell

from mamba_eagle.core import FinishReason
from mamba_eagle.message import Generate

PATH = "/v1/embeddings"


def nothing(request: Generate) -> Any:
    return [], length_of([])


def vector_of(ids: list[int]) -> list[float]:
    return [len(ids), ids[0], ids[-1]]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_each_input_gets_a_vector_in_its_place(pooling: str) -> None:
    async def test() -> None:
        async with serving(nothing, pooling_method=pooling) as server:
            for given, lists in (
                ("abc", [spell("abc")]),
                (["abc", "d"], [spell("abc"), spell("d")]),
                ([5, 6, 7], [[5, 6, 7]]),
                ([[5, 6], [7]], [[5, 6], [7]]),
            ):
                reply = (await server.post(PATH, input=given, normalize=False, model="tiny")).json()
                assert reply["object"] == "list" and reply["model"] == "tiny"
                assert [one["embedding"] for one in reply["data"]] == list(map(vector_of, lists))
                assert [one["index"] for one in reply["data"]] == list(range(len(lists)))
                assert {one["object"] for one in reply["data"]} == {"embedding"}
                tokens = sum(map(len, lists))
                assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
            sent = server.engine.of(Generate)
            assert {request.pooling for request in sent} == {pooling}
            assert all(request.sampling.max_new_tokens == 0 for request in sent)

    run(test())


def test_vectors_have_a_length_of_one_as_numbers_and_as_bytes() -> None:
    async def test() -> None:
        async with serving(nothing) as server:
            (one,) = (await server.post(PATH, input=[5, 6, 7])).json()["data"]
            assert math.hypot(*one["embedding"]) == pytest.approx(1, abs=1e-6)
            assert one["embedding"] == pytest.approx([v / math.hypot(3, 5, 7) for v in (3, 5, 7)])
            coded = await server.post(PATH, input=[5, 6, 7], encoding_format="base64")
            text = coded.json()["data"][0]["embedding"]
            assert list(struct.unpack("<3f", base64.b64decode(text))) == one["embedding"]

    run(test())


def test_numbers_that_json_has_not_and_ends_by_others_are_errors() -> None:
    async def test() -> None:
        async with serving(nothing) as server:
            server.engine.embed = lambda request: struct.pack("<3f", 1, math.nan, 2)
            reply = await server.post(PATH, input="a")
            assert reply.status_code == 500 and "not finite" in reply.text
            server.engine.embed = lambda request: struct.pack("<3f", 0, 0, 0)
            reply = await server.post(PATH, input="a")
            assert reply.json()["data"][0]["embedding"] == [0, 0, 0]
            server.engine.embed = lambda request: b""
            server.engine.script = lambda request: ([], FinishReason("abort", message="enough"))
            reply = await server.post(PATH, input="a")
            assert reply.status_code == 400 and "ended: enough" in reply.text

    run(test())


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"input": None}, ["input = null", "string"]),
    ({"input": []}, ["input = []"]),
    ({"input": ""}, ['input = ""', "empty"]),
    ({"input": ["a", ""]}, ["input[1]", "empty"]),
    ({"input": ["a", 5]}, ["input", "list of strings"]),
    ({"input": [[5], "a"]}, ["input[1]", "token ids"]),
    ({"input": [5, 300]}, ["input[1] = 300", "299"]),
    ({"input": "x" * 64}, ["input", "63"]),
    ({"input": ["a"] * 2049}, ["input: 2049 inputs", "2048"]),
    ({"dimensions": 8}, ["dimensions = 8", "leave the field out"]),
    ({"encoding_format": "hex"}, ['encoding_format = "hex"', "float or base64"]),
    ({"normalize": 1}, ["normalize = 1"]),
    ({"timeout": -1}, ["timeout = -1"]),
]


def test_bad_bodies_are_named() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            for body, parts in BAD:
                reply = await server.post(PATH, **{"input": "a", **body})
                assert reply.status_code == 400, (body, reply.text)
                for part in parts:
                    assert part in reply.json()["error"]["message"], reply.text
            assert server.engine.of(Generate) == []

    run(test())
