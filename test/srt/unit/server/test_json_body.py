"""Bodies are counted before they are decoded, and decoded in pieces that change nothing."""

from __future__ import annotations

import json
import random
import re
from itertools import accumulate
from typing import Any

import pytest

from mamba_eagle.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_ITEMS,
    MAX_JSON_STRINGS,
)
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http import json_body
from mamba_eagle.server.http.json_body import Counts, decode_object, decode_token_ids, scan


def naive_counts(text: bytes) -> Counts:
    plain = re.sub(rb'"(?:[^"\\]|\\.)*"', b"S", text, flags=re.DOTALL)
    containers = plain.count(b"[") + plain.count(b"{")
    depths = accumulate(1 if byte in b"[{" else -1 for byte in plain if byte in b"[{]}")
    deepest = max(depths, default=0)
    return Counts(containers, plain.count(b"S"), plain.count(b",") + containers, deepest)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.4:
        return "".join(rng.choice('a"\\[{,\né}]') for _ in range(rng.randrange(12)))
    if kind < 0.5:
        return rng.randrange(1000)
    if kind < 0.75:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {f'{i}"\\': random_value(rng, depth + 1) for i in range(rng.randrange(5))}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, json_body.SLICE])
def test_counts_are_those_outside_of_strings(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the text is cut: within a string, within an escape."""
    monkeypatch.setattr(json_body, "SLICE", size)
    rng = random.Random(size)
    for _ in range(200):
        text = json.dumps(random_value(rng), ensure_ascii=rng.random() < 0.5).encode()
        assert scan(text) == naive_counts(text), text


def test_an_unfinished_text_is_counted_too() -> None:
    assert scan(b'[{"a":["b') == Counts(3, 2, 3, 3)
    assert scan(b"") == Counts(0, 0, 0, 0)


@pytest.mark.parametrize(
    "inner, count, what, most",
    [
        (b"[]", MAX_JSON_CONTAINERS, "arrays and objects", MAX_JSON_CONTAINERS),
        (b'{"":1}', MAX_JSON_CONTAINERS, "arrays and objects", MAX_JSON_CONTAINERS),
        (b'"a"', MAX_JSON_STRINGS, "strings", MAX_JSON_STRINGS),
        (b"1", MAX_JSON_ITEMS, "items", MAX_JSON_ITEMS),
    ],
)
def test_a_body_of_too_many_parts_is_refused(
    inner: bytes, count: int, what: str, most: int
) -> None:
    body = b'{"x":[' + b",".join([inner] * count) + b"]}"
    with pytest.raises(RequestError, match=f"{what}.* at most {most}"):
        decode_object(body)


@pytest.mark.parametrize("begin, end", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize("filler", [0, json_body.UNSCANNED], ids=["short", "long"])
def test_the_depth_of_a_body_has_a_limit(begin: str, end: str, filler: int) -> None:
    """Whatever reads it: near Python's own limit it would fail in one place or another."""

    def body(depth: int) -> bytes:
        inner = begin * (depth - 1) + "1" + end * (depth - 1)
        return f'{{"text": "{"]" * filler}", "x": {inner}}}'.encode()

    assert decode_object(body(MAX_JSON_DEPTH))
    for depth in (MAX_JSON_DEPTH + 1, 950, 990, 5000):
        with pytest.raises(RequestError, match=f"more than {MAX_JSON_DEPTH} deep"):
            decode_object(body(depth))


def test_numbers_belong_into_lists_of_token_ids() -> None:
    numbers = b"[" + b",".join([b"1.23456789012345678901234e-30"] * 40_000) + b"]"
    with pytest.raises(RequestError, match="logit_bias: has more numbers"):
        decode_object(b'{"logit_bias":' + numbers + b"}")
    ids = list(range(40_000))
    own = ("input", "items", "label_token_ids", "query", "token_ids", "token_ids_logprob")
    for name in ("input_ids", "prompt", "tokens", *own):
        body = {name: ids, "rid": "a", "sampling_params": {"temperature": 0.5}}
        assert decode_object(json.dumps(body).encode()) == body
    mixed = {"input_ids": [*ids, "x"]}
    with pytest.raises(RequestError, match="input_ids: has more numbers"):
        decode_object(json.dumps(mixed).encode())


@pytest.mark.parametrize("piece", [1, 2, 5, 30, 2**16])
@pytest.mark.parametrize("space", ["", " ", " \n\t"])
def test_token_ids_in_pieces_are_those_of_one(
    piece: int, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "PIECE", piece)
    rng = random.Random(piece)

    def ids() -> list[Any]:
        return [rng.choice([rng.randrange(10**6), 5.5, None]) for _ in range(rng.randrange(9))]

    for _ in range(100):
        value = ids() if rng.random() < 0.5 else [ids() for _ in range(rng.randrange(9))]
        text = json.dumps(value).replace(" ", "").replace(",", f",{space}")
        text = text.replace("[", f"[{space}").replace("]", f"{space}]")
        assert decode_token_ids(f"{space}{text}{space}".encode()) == value, text


def test_a_wrong_id_in_a_long_list_is_found_by_its_place() -> None:
    values = decode_object(json.dumps({"input_ids": [7] * 50_000 + [2.5]}).encode())
    assert values["input_ids"][50_000] == 2.5


def test_short_bodies_may_hold_what_json_does_not() -> None:
    assert decode_object(b'{"a": Infinity}') == {"a": float("inf")}
    assert decode_object(b" \n") == {}
    long = b'{"a": NaN, "b": "' + b"x" * json_body.UNSCANNED + b'"}'
    with pytest.raises(RequestError, match="not valid JSON"):
        decode_object(long)
