"""Prompts beside decode steps: how even streams are, in a simulation with exact times."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from mamba_eagle.scheduler.pace import MAX_SHARE, MIN_STEPS, MIN_TOKENS, PromptPace

MOST = 8192  # tokens per step on a GPU


class Gpu(NamedTuple):
    """Step times of one H200 with the geometry of Nemotron-Nano-9B-v2, in seconds."""

    fixed: float  # a decode step of no requests
    per_request: float
    tokens: int  # of a request per decode step
    per_prompt_token: float = 1 / 38_000
    per_prompt_pass: float = 0.004


TREES, PLAIN = Gpu(0.0045, 0.00021, 3), Gpu(0.005, 0.00006, 1)


class Served(NamedTuple):
    ratio: float  # p99 of times between two tokens of a stream, to their median
    tokens_per_second: float
    slowest: float  # seconds


def served(gpu: Gpu, clients: int, prompt: int, output: int, paced: bool) -> Served:
    """Clients that send the next request when the last one is answered; lengths vary by a third."""
    rng = random.Random(1)
    length = lambda mean: rng.randint(mean * 2 // 3, mean * 4 // 3)  # noqa: E731
    pace = PromptPace(MOST, paced)
    waiting = [[length(prompt), length(output)] for _ in range(clients)]  # tokens that are left
    running: list[list[int]] = []
    gaps: list[float] = []
    made, now = 0, 0.0
    for step in range(3000):
        budget = left = pace.tokens(bool(running))
        decode = (gpu.fixed + gpu.per_request * len(running)) if running else 0.0
        while waiting and left:
            taken = min(left, waiting[0][0])
            waiting[0][0] -= taken
            left -= taken
            if not waiting[0][0]:
                running.append(waiting.pop(0))
        seconds = decode + (budget - left) * gpu.per_prompt_token
        seconds += gpu.per_prompt_pass if left < budget else 0.0
        now += seconds
        pace.observe(seconds, decode, budget - left)
        for request in running if decode else []:
            made += gpu.tokens
            request[1] -= gpu.tokens
            if step > 200:  # the first prompts of all clients come together
                gaps.append(seconds)
        ended = [request for request in running if request[1] <= 0]
        running = [request for request in running if request[1] > 0]
        waiting += [[length(prompt), length(output)] for _ in ended]
    gaps.sort()
    p50, p99 = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
    return Served(p99 / p50, made / now, gaps[-1])


@pytest.mark.parametrize("gpu", [TREES, PLAIN], ids=["trees", "plain"])
def test_streams_of_64_clients_are_even(gpu: Gpu) -> None:
    """512 tokens in, 128 out. What it costs is a few percent of the tokens at most."""
    paced, free = (served(gpu, 64, 512, 128, paced) for paced in (True, False))
    print(f"paced {paced}, free {free}")
    assert paced.ratio <= 2.0 < free.ratio
    assert paced.tokens_per_second > 0.93 * free.tokens_per_second


@pytest.mark.parametrize("gpu", [TREES, PLAIN], ids=["trees", "plain"])
@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.008, 0.03])
def test_short_passes_cost_few_tokens_whatever_a_pass_costs(gpu: Gpu, seconds: float) -> None:
    gpu = gpu._replace(per_prompt_pass=seconds)
    paced, free = (served(gpu, 64, 512, 128, paced) for paced in (True, False))
    print(f"paced {paced}, free {free}")
    assert paced.tokens_per_second > 0.93 * free.tokens_per_second


def test_a_long_prompt_does_not_stop_streams() -> None:
    """16,000 tokens beside 31 short requests."""
    paced, free = (served(TREES, 32, 16_000, 300, paced) for paced in (True, False))
    assert paced.slowest < 0.06 < 0.2 < free.slowest


def test_nothing_is_limited_where_nobody_waits() -> None:
    pace = PromptPace(MOST, paced=True)
    assert pace.tokens(decodes=True) == MOST, "nothing is measured yet"
    for _ in range(MIN_STEPS):
        pace.observe(0.03, 0.01, 1000)
    assert pace.tokens(decodes=False) == MOST
    assert pace.tokens(decodes=True) == int(MAX_SHARE * 0.01 / (0.02 / 1000))


def test_the_fixed_part_of_a_pass_is_told_apart() -> None:
    """10 ms and 20 µs per token; now and then a step of a second."""
    pace = PromptPace(MOST, paced=True)
    for number in range(60):
        tokens = 300 + 20 * number
        seconds = 1.0 if number % 9 == 8 else 0.01 + 20e-6 * tokens
        pace.observe(0.04 + seconds, 0.04, tokens)
    ideal = int((MAX_SHARE * 0.04 - 0.01) / 20e-6)
    assert abs(pace.tokens(decodes=True) - ideal) < 0.05 * ideal


def test_a_size_that_was_set_is_what_steps_take() -> None:
    pace = PromptPace(512, paced=False)
    for _ in range(20):
        pace.observe(1.0, 0.01, 512)
    assert pace.tokens(decodes=True) == 512


def test_times_that_were_not_measured_limit_nothing() -> None:
    pace = PromptPace(MOST, paced=True)
    for _ in range(20):
        pace.observe(0.0, 0.0, 512)
        pace.observe(0.02, 0.02, 0)
    assert pace.tokens(decodes=True) == MOST
    pace.observe(9.0, 0.02, 300)
    assert pace.tokens(decodes=True) == MIN_TOKENS, "however slow prompts are"
