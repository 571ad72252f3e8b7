"""Prompts beside decode steps: how even streams are, in virtual time, and what is learned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmark.lib.served import Scenario, Summary
from benchmark.lib.virtual import (
    CPU,
    H200,
    H200_FP8,
    H200_PLAIN,
    Costs,
    VirtualRunner,
    VirtualServer,
    play,
    ready,
)
from benchmark.lib.virtual_stages import H100_STAGES, StageCosts, VirtualStages
from mamba_eagle.config import EngineConfig
from mamba_eagle.scheduler.pace import (
    BURST_TOKENS,
    EVEN_TOKENS,
    FIRST_TOKENS,
    MAX_RATIO,
    MAX_SHARE,
    MIN_FILL,
    MIN_SHARE,
    MIN_TOKENS,
    RECENT,
    SAMPLES,
    PassTimes,
    PromptPace,
)

MOST = 8192  # tokens per step on a GPU
MANY = Scenario("many", 64, 3, input_len=512, output_len=128, vocab_size=131_072)


def served(costs: Costs, paced: bool, *scenarios: Scenario) -> list[Summary]:
    """What clients see, after one request of each to warm up."""
    places = sum(scenario.clients for scenario in scenarios)
    config = EngineConfig(
        model_path="virtual",
        max_running_requests=places,
        chunked_prefill_size=None if paced else MOST,
        speculative_algorithm="STANDALONE" if costs.tokens > 1 else "NONE",
        speculative_eagle_topk=3,
        speculative_adaptive=False,
    )
    room, staged = ready(places), isinstance(costs, StageCosts)
    room.cohorts = 2 if staged else 1
    server = VirtualServer(costs, config, room, VirtualStages if staged else VirtualRunner)
    play(server, *(replace(each, name=f"{each.name} before", requests=1) for each in scenarios))
    found = play(server, *scenarios)
    assert [each.requests for each in found] == [s.clients * s.requests for s in scenarios]
    return found


def ratio(found: Summary) -> float:
    return found.inter_token_p99 / found.inter_token_p50


@pytest.mark.parametrize(
    ("costs", "least"),
    [
        pytest.param(H200, 0.9, id="trees"),
        pytest.param(replace(H200, jitter=0.1), 0.9, id="noisy"),
        pytest.param(replace(H200, launch_pass=0.02, launch_jitter=0.5), 0.85, id="slow launches"),
        pytest.param(replace(H200, stalls=[(1, 2.5)]), 0.9, id="first pass takes seconds"),
        pytest.param(H200_PLAIN, 0.8, id="plain"),
        pytest.param(H200_FP8, 0.8, id="launches of passes take longer than they"),
    ],
)
def test_streams_of_64_clients_are_even(costs: Costs, least: float) -> None:
    """Clients begin together and want the same, so whole prompts are run while nothing else is:
    what the pace costs beside that is all that it can cost."""
    ((paced,), (free,)) = (served(costs, paced, MANY) for paced in (True, False))
    print(f"paced {paced}\nfree {free}")
    assert ratio(paced) <= 2.0 < ratio(free)
    assert paced.tokens_per_second > least * free.tokens_per_second


def test_two_stages_run_a_burst_in_passes_that_are_worth_it() -> None:
    """Streams wait no longer for it than on one device, and first tokens come sooner."""
    clients = replace(MANY, input_len=256)
    (two,), (one,) = (served(costs, True, clients) for costs in (H100_STAGES, H100_STAGES.alone()))
    print(f"two {two}\none {one}")
    assert two.tokens_per_second > 1.55 * one.tokens_per_second
    assert two.first_token_p50 < 0.6 * one.first_token_p50
    assert two.inter_token_p99 < 1.2 * one.inter_token_p99


def test_a_long_prompt_does_not_stop_streams() -> None:
    """16,384 tokens, again and again, beside 16 short requests."""
    streams = replace(MANY, clients=16, input_len=64)
    long = Scenario("long", 1, 2, input_len=16_384, output_len=4, vocab_size=131_072)
    paced, free = (served(H200, paced, streams, long) for paced in (True, False))
    assert paced[0].inter_token_p99 < 15 < 60 < free[0].inter_token_p99
    assert paced[1].first_token_p99 < 2.5 * free[1].first_token_p99


def test_on_a_cpu_streams_wait_for_small_parts_of_a_prompt() -> None:
    streams = replace(MANY, clients=4, input_len=16)
    prompts = Scenario("prompts", 1, 6, input_len=1000, output_len=4, vocab_size=131_072)
    paced, free = (served(CPU, paced, streams, prompts)[0] for paced in (True, False))
    assert paced.inter_token_p99 < 5 < 20 < free.inter_token_p99
    assert paced.tokens_per_second > 0.95 * free.tokens_per_second


def learned(pace: PromptPace, decode: float, beside: int, steps: int = EVEN_TOKENS) -> PromptPace:
    """Of a device that takes 20 µs per prompt token, after steps with ``beside`` of them."""
    pace.observe(20e-6 * MOST, 0.0, MOST, 0.0)
    for _ in range(steps):
        pace.observe(decode + 20e-6 * beside, decode, beside, 1.0)
    return pace


def test_nothing_is_limited_where_nobody_waits() -> None:
    pace = learned(PromptPace(MOST, paced=True), 0.01, 100)
    assert pace.tokens(decodes=False, waiting=10) == MOST


def test_a_size_that_was_set_is_what_steps_take() -> None:
    pace = learned(PromptPace(512, paced=False), 0.001, 512)
    assert pace.tokens(decodes=True, waiting=9000) == 512


@pytest.mark.parametrize("beside", [100, 1000, 1500])
def test_a_step_lasts_little_longer_than_with_prompts_spread_evenly(beside: int) -> None:
    pace = learned(PromptPace(MOST, paced=True), 0.01, beside)
    even = 0.01 + 20e-6 * beside
    spare = max(MAX_RATIO * even - 0.01, MIN_SHARE * 0.01)
    assert pace.tokens(decodes=True, waiting=20_000) == pytest.approx(spare / 20e-6, abs=2)


def test_steps_without_prompts_are_part_of_what_is_even() -> None:
    pace = learned(PromptPace(MOST, paced=True), 0.01, 0)
    for number in range(EVEN_TOKENS):
        tokens = 0 if number % 4 else 4000
        pace.observe(0.01 + 20e-6 * tokens, 0.01, tokens, 1.0)
    wanted = (MAX_RATIO * (0.01 + 20e-6 * 1000) - 0.01) / 20e-6
    assert pace.tokens(decodes=True, waiting=20_000) == pytest.approx(wanted, rel=0.01)


def test_more_than_half_of_the_steps_have_prompts_where_small_passes_cost_as_much() -> None:
    """All passes take 20 ms, so a step of 1.3 times the even one's time has room for any number."""
    pace = PromptPace(MOST, paced=True)
    for tokens in (16, 128, 1000, 1100, 4000):
        pace.observe(0.02, 0.0, tokens, 0.0)
    for number in range(EVEN_TOKENS):
        tokens = 0 if number % 2 else 4400
        pace.observe(0.034 if tokens else 0.014, 0.014, tokens, 1.0)
    wanted = 2200 / MIN_FILL
    assert pace.tokens(decodes=True, waiting=20_000) == pytest.approx(wanted, abs=2)


@pytest.mark.parametrize("made", [1.0, 3.0])
def test_a_burst_is_spread_over_a_streams_tokens_until_it_is_over(made: float) -> None:
    pace = learned(PromptPace(MOST, paced=True), 0.01, 0)
    for _ in range(RECENT):
        pace.observe(0.01, 0.01, 0, made)
    wanted = 60_000 * made / BURST_TOKENS
    for waiting in (60_000, 30_000, 9000):
        assert pace.tokens(decodes=True, waiting=waiting) == pytest.approx(wanted, abs=2)
    assert pace.tokens(decodes=True, waiting=0) < wanted / 1.2
    assert pace.tokens(decodes=True, waiting=9000) < wanted / 1.2


def test_prompts_never_take_much_longer_than_decoding() -> None:
    pace = learned(PromptPace(MOST, paced=True), 0.001, 0)
    tokens = pace.tokens(decodes=True, waiting=10**6)
    assert tokens == pytest.approx(MAX_SHARE * 0.001 / 20e-6, abs=2)


def test_a_rest_that_is_worth_no_pass_goes_along() -> None:
    """Passes of 10 ms and 20 µs per token."""
    pace = PromptPace(MOST, paced=True)
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096, MOST):
        pace.observe(0.01 + 20e-6 * tokens, 0.0, tokens, 0.0)
    for _ in range(EVEN_TOKENS):
        pace.observe(0.001, 0.001, 0, 1.0)
    least = pace.tokens(decodes=True, waiting=MOST)
    assert 500 < least < 3000
    assert pace.tokens(decodes=True, waiting=least + 100) == least + 100
    assert pace.tokens(decodes=True, waiting=2 * least) == least


def test_while_nothing_is_known_prompts_are_spread_all_the_same() -> None:
    pace = PromptPace(MOST, paced=True)
    pace.observe(0.0, 0.0, 512, 0.0)  # times that were not measured
    pace.observe(0.0, 0.0, 0, 1.0)
    assert pace.tokens(decodes=True, waiting=100) == FIRST_TOKENS
    pace.observe(9.0, 0.02, 512, 1.0)
    assert pace.tokens(decodes=True, waiting=600) == MIN_TOKENS, "however slow prompts are"


def affine(*sizes: int, fixed: float = 0.01, each: float = 20e-6) -> PassTimes:
    passes = PassTimes()
    for tokens in sizes:
        passes.observe(tokens, fixed + each * tokens)
    return passes


def test_times_between_known_sizes_lie_on_lines() -> None:
    passes = affine(128, 1024, MOST)
    for tokens in (128, 200, 512, 1024, 5000, MOST):
        assert passes.seconds(tokens) == pytest.approx(0.01 + 20e-6 * tokens)
        assert abs(passes.tokens(passes.seconds(tokens)) - tokens) <= 1


def test_sizes_beyond_the_known_ones_cost_the_same_per_token() -> None:
    passes = affine(512)
    each = passes.seconds(512) / 512
    for tokens in (64, 4096):
        assert passes.seconds(tokens) == pytest.approx(tokens * each)
        assert abs(passes.tokens(tokens * each) - tokens) <= 1


def test_single_slow_passes_move_nothing() -> None:
    passes, disturbed = affine(512, 1024), PassTimes()
    for number in range(SAMPLES):
        disturbed.observe(512, 9.0 if number % 3 == 1 else 0.01 + 20e-6 * 512)
        disturbed.observe(1024, 5.0 if number % 4 == 1 else 0.01 + 20e-6 * 1024)
    assert disturbed.seconds(700) == pytest.approx(passes.seconds(700))


def test_what_was_slow_once_is_forgotten() -> None:
    passes = affine(512, fixed=2.5)
    for _ in range(SAMPLES):
        passes.observe(512, 0.02)
    assert passes.seconds(512) == pytest.approx(0.02)


def test_a_pass_takes_no_longer_than_a_longer_one() -> None:
    passes = affine(4096)
    passes.observe(300, 1.0)
    assert passes.seconds(300) == passes.seconds(4096) == pytest.approx(0.01 + 20e-6 * 4096)
    assert passes.tokens(passes.seconds(4096)) == 4096


def test_passes_are_worth_it_from_where_the_fixed_part_is_small() -> None:
    """10 ms and 20 µs per token: 8,192 of them take 21.2 µs each, of which 1.35 times is 28.6."""
    sizes = [2**n for n in range(4, 14)]
    assert affine(*sizes).worthwhile() == pytest.approx(0.01 / 8.6e-6, rel=0.01)
    assert affine(*sizes, fixed=0.0).worthwhile() <= 16
    # all are launched by a host that takes longer than the device
    flat = affine(*sizes, fixed=0.2, each=0.0)
    assert flat.worthwhile() > MOST / 1.4
