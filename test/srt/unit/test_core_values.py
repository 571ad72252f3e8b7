"""What is shown of values, and which parameters and prompts an engine can take."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tensor_checks import host_backend, sample

from mamba_eagle.core import SamplingParams, prompt_problem, shown
from mamba_eagle.limits import (
    GREEDY_BELOW,
    MAX_LOGIT_BIAS,
    MAX_SHOWN,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from mamba_eagle.runner.sampling_state import SamplingState


@pytest.mark.parametrize(
    "value", ["a\nb\x1b[31m", "x" * 198, "é😀", 5, 1.5, True, None, [1, [2]], {"a": {"b": []}}, ""]
)
def test_short_values_are_shown_as_json(value: Any) -> None:
    assert json.loads(shown(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        [0] * 10**6,
        [[]] * 10**6,
        {str(i): i for i in range(10**5)},
        [["a" * 100] * 100] * 100,
    ],
    ids=["text", "numbers", "lists", "keys", "nested"],
)
def test_long_values_are_cut(value: Any) -> None:
    assert len(shown(value)) == MAX_SHOWN and shown(value).endswith("...")


def test_no_control_character_is_shown_raw() -> None:
    every = "".join(map(chr, [*range(32), *range(127, 160), 0x2028, 0x2029, 0xD800, 0xDFFF]))
    for start in range(0, len(every), 16):
        text = shown(every[start : start + 16])
        assert text.isprintable() and "\n" not in text


def test_deep_and_huge_values_are_shown() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert len(shown(deep)) == MAX_SHOWN
    assert "16610 bits" in shown(10**5000)
    assert shown(object()).startswith('"<object')


# ── parameters ───────────────────────────────────────────────────────────────────────────────

ALLOWED = {
    "temperature": [0.0, GREEDY_BELOW, MAX_TEMPERATURE],
    "top_p": [1e-300, 1.0],
    "min_p": [0.0, 1e-300, 1.0],
    "top_k": [-1, 0, 1, 2**62],
    "repetition_penalty": [MIN_REPETITION_PENALTY, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [{0: -MAX_LOGIT_BIAS, 1: MAX_LOGIT_BIAS}],
}


def test_what_is_out_of_range_is_named() -> None:
    for name, wrong in {
        "temperature": [-1.0, 1e39, 1e-300, math.nan, math.inf],
        "top_p": [0.0, 1.1, math.nan],
        "min_p": [-0.1, 1.1],
        "top_k": [-2],
        "repetition_penalty": [0.0, 1e-46, 2.1],
        "frequency_penalty": [-2.1, math.nan],
        "presence_penalty": [2.1],
        "logit_bias": [{0: 1e5}, {0: math.nan}, {50: 1.0}, {-1: 1.0}],
        "stop_token_ids": [[50], [-1]],
        "stop": [["a", ""]],
        "min_new_tokens": [-1, 129],
        "max_new_tokens": [-1],
        "seed": [-1, 2**63],
    }.items():
        for value in wrong:
            problems = SamplingParams(**{name: value}).problems(50)
            assert name in [problem.name for problem in problems], (name, value)
            assert f"sampling_params.{name} = {shown(value)}: " in ";".join(map(str, problems))
    for name, values in ALLOWED.items():
        for value in values:
            assert SamplingParams(**{name: value}).problems(50) == [], (name, value)


@pytest.mark.parametrize("name, value", [(n, v) for n, values in ALLOWED.items() for v in values])
@pytest.mark.parametrize("early", [False, True], ids=["free", "before-min-new-tokens"])
def test_every_allowed_extreme_samples_a_token(name: str, value: Any, early: bool) -> None:
    """In float32, with stop tokens banned: no NaN, and never a banned token."""
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "top_k": 20}
    params = SamplingParams(
        min_new_tokens=5 if early else 0,
        stop_token_ids=list(range(3, 50)) if early else [],
        **{**values, "repetition_penalty": 1.3, "frequency_penalty": 0.5, name: value},
    )
    state = SamplingState(1, 50, (0,), host_backend())
    state.set(0, params, 2, [1, 2])
    logits = torch.linspace(-40.0, 40.0, 50)[None, None]
    token = int(sample(state, [0], logits, torch.tensor([[2]]), None))
    assert token in ((1, 2) if early else range(50))


def test_a_vocabulary_that_is_banned_whole_is_refused() -> None:
    every = list(range(1, 50))
    for minimum, eos, ignore_eos, refused in (
        (1, (0,), False, True),
        (0, (0,), False, False),
        (1, (), False, False),
        (1, (0,), True, False),
    ):
        params = SamplingParams(min_new_tokens=minimum, stop_token_ids=every, ignore_eos=ignore_eos)
        problems = params.problems(50, eos)
        assert [problem.name for problem in problems] == ["stop_token_ids"] * refused
    assert (
        "min_new_tokens"
        in SamplingParams(min_new_tokens=1, stop_token_ids=list(range(50))).problems(50)[0].remedy
    )


# ── prompts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "ids, problem",
    [
        ([], "empty"),
        ([1] * 10, "10 tokens, but at most 9 fit"),
        ([1, 50], "[1] = 50"),
        ([-1], "[0] = -1"),
        ([1, True], "[1] = true"),
        ([1, 2.0], "[1] = 2.0"),
        ([[1]], "[0] = [1]"),
        (["x" * 1000], '[0] = "xxx'),
        ([1] * 9, ""),
    ],
)
def test_prompts_are_checked_in_one_place(ids: list[Any], problem: str) -> None:
    found = prompt_problem(ids, 50, 10)
    assert problem in found and bool(problem) == bool(found)
    assert len(found) < 2 * MAX_SHOWN
