"""The choice of shapes: never slower than plain, close to the best, and at little cost.

Times are exact sums of simulated steps; no clock is read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from statistics import mean

import pytest
from simulated_steps import CPU, GPU, SAME, UNIFORM, Experts, Machine, Noise, Run, Simulation

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.scheduler.estimates import RequestDrafts
from mamba_eagle.scheduler.speculation import (
    EXPLORATION_SHARE,
    MAX_CREDIT,
    AdaptiveShape,
    Choice,
    FixedShape,
    Outcome,
    shape_policy,
)
from mamba_eagle.tree.shapes import candidate_shapes

TREE = TreeShape(topk=2, depth=5, nodes=8)
MACHINES = {"gpu": GPU, "cpu": CPU}
BATCHES = [1, 8, 32]


def rate(value: float):
    return lambda request, position: value


def fixed(
    shape: TreeShape, machine: Machine | Experts, batch: int, accepted, tokens: int, seed=0
) -> float:
    """Tokens a second of a server that always drafts this shape; plain: one without a drafter."""
    alone = machine._replace(following=0.0, taking_in=0.0) if shape == PLAIN else machine
    return Simulation(FixedShape(shape), alone, batch, accepted, seed=seed).run(tokens).rate


def adaptive(machine: Machine, batch: int, accepted, tokens: int, **others) -> Run:
    return Simulation(AdaptiveShape(TREE), machine, batch, accepted, **others).run(tokens)


# ── how fast ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("accepted", [0.0, 0.05])
def test_a_useless_drafter_costs_less_than_3_percent(machine, batch, accepted):
    """From the first step on: 300 steps, nothing known before."""
    plain = fixed(PLAIN, MACHINES[machine], batch, rate(accepted), 300)
    assert adaptive(MACHINES[machine], batch, rate(accepted), 300).rate >= 0.97 * plain


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("accepted", [0.3])  # more: as fast as the best, below
def test_no_drafter_makes_it_slower_than_plain(machine, batch, accepted):
    plain = fixed(PLAIN, MACHINES[machine], batch, rate(accepted), 300)
    assert adaptive(MACHINES[machine], batch, rate(accepted), 300).rate >= 0.97 * plain


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("accepted", [0.6, 0.8, 0.9])
def test_a_good_drafter_runs_within_3_percent_of_the_best_fixed_shape(machine, batch, accepted):
    """Over a few hundred steps, the first trials included; means of three runs at batch 1, where
    which shape is best is a matter of chance in a single one."""
    shares = []
    for seed in range(3 if batch == 1 else 1):
        given = (MACHINES[machine], batch, rate(accepted), {1: 1800, 8: 900, 32: 600}[batch])
        best = max(fixed(shape, *given, seed=seed) for shape in candidate_shapes(TREE))
        shares.append(adaptive(*given, seed=seed).rate / best)
    assert mean(shares) >= 0.97


@pytest.mark.parametrize("routing", [UNIFORM, SAME], ids=["uniform", "same"])
@pytest.mark.parametrize("batch", [1, 8, 32, 64])
@pytest.mark.parametrize("accepted", [0.2, 0.5, 0.9])
def test_with_experts_it_is_as_fast_as_a_chain_or_none(routing, batch, accepted):
    """Once the shapes are known, the trials that go on included."""
    tokens = {1: 2400, 8: 1200, 32: 600, 64: 450}[batch]
    simulation = Simulation(AdaptiveShape(TREE), routing, batch, rate(accepted))
    simulation.run(tokens)
    chain = TreeShape(1, TREE.depth, TREE.depth + 1)
    best = max(fixed(shape, routing, batch, rate(accepted), tokens) for shape in (PLAIN, chain))
    assert simulation.run(tokens).rate >= 0.98 * best


@pytest.mark.parametrize("batch", BATCHES)
def test_different_machines_and_batches_get_different_shapes(batch):
    """The runs above are not all won by one shape."""
    used = {
        adaptive(machine, batch, rate(value), 1500).steps.most_common(1)[0][0]
        for machine in MACHINES.values()
        for value in (0.0, 0.5, 0.9)
    }
    assert "plain" in used and len(used) >= 2


def test_trials_stay_within_their_budget_in_the_long_run():
    for machine in MACHINES.values():
        machine = machine._replace(following=0.0)  # what trials lose, and nothing else
        run = adaptive(machine, 8, rate(0.0), 5000)
        plain = fixed(PLAIN, machine, 8, rate(0.0), 5000)
        assert 1 - run.rate / plain <= 1.1 * EXPLORATION_SHARE
        assert sum(choice.trial for choice in run.choices) > 4  # it goes on looking


# ── a drafter that hits nothing ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_useless_drafter_that_takes_long_for_prompts_is_given_up(machine, batch):
    """No step tells what it takes for them: half a plain step each, and 1 % of every plain step.
    If it tracked all requests, that alone would be more than 3 % at batch 32."""
    slow = MACHINES[machine]._replace(taking_in=0.5)
    simulation = Simulation(AdaptiveShape(TREE), slow, batch, rate(0.02))
    simulation.run(2000)
    assert simulation.policy.disabled and simulation.policy.state().disabled
    plain = fixed(PLAIN, slow, batch, rate(0.02), 2000)
    assert simulation.run(2000).rate >= 0.98 * plain


@pytest.mark.parametrize("batch", BATCHES)
def test_one_that_was_given_up_is_tried_again(batch):
    """On requests that it has tracked from the beginning; when it hits, it follows all."""
    now = [0.0]
    simulation = Simulation(AdaptiveShape(TREE), GPU, batch, lambda request, position: now[0])
    simulation.run(1500)
    assert simulation.policy.disabled
    disabled = simulation.run(3000)
    assert sum(choice.trial for choice in disabled.choices) > 0
    now[0] = 0.9
    simulation.run(3000)
    assert not simulation.policy.disabled
    assert all(request.tracked for request in simulation.requests)


def test_where_nobody_is_followed_nothing_is_drafted():
    policy = AdaptiveShape(TREE)
    Simulation(policy, GPU, 8, rate(0.9)).run(600)
    lost = [RequestDrafts(tracked=False) for _ in range(4)]
    assert policy.choose(lost, []).shape == PLAIN
    tracked = RequestDrafts()
    policy.admit(tracked)
    assert policy.choose([tracked], []).shape != PLAIN


# ── what changes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batch", BATCHES)
def test_it_follows_when_drafts_become_good_or_bad(batch):
    """As when other requests come. Speculation begins again, and ends again, within the runs."""
    now = [0.0]
    simulation = Simulation(AdaptiveShape(TREE), GPU, batch, lambda request, position: now[0])
    plain, good = (fixed(PLAIN, GPU, batch, rate(value), 1500) for value in (0.0, 0.9))
    assert simulation.run(1500).rate >= 0.97 * plain
    now[0] = 0.9
    simulation.run(1500)
    assert simulation.run(1500).rate >= 1.4 * good
    now[0] = 0.0
    turned = simulation.run(1500)
    won_before = MAX_CREDIT * GPU.plain(batch)  # seconds that trials may spend
    assert turned.tokens / (turned.seconds - won_before) >= 0.97 * plain
    assert simulation.run(1500).rate >= 0.97 * plain


@pytest.mark.parametrize(
    ("before", "now", "batch", "accepted", "seed"),
    [(UNIFORM, SAME, 32, 0.3, 1), (SAME, UNIFORM, 8, 0.5, 0)],
    ids=["fewer", "more"],
)
def test_it_follows_when_tokens_have_other_experts(before, now, batch, accepted, seed):
    """Then plain steps change by more than those with drafts, or by less, and all of them at once,
    as on a machine with other users."""
    simulation = Simulation(AdaptiveShape(TREE), before, batch, rate(accepted), seed=seed)
    simulation.run(600)
    simulation.machine = now
    simulation.run(500)
    plain = fixed(PLAIN, now, batch, rate(accepted), 500, seed=seed)
    assert simulation.run(500).rate >= 0.97 * plain


def test_it_follows_when_the_batch_grows():
    """Trees pay for few requests on a CPU and not for many."""
    simulation = Simulation(AdaptiveShape(TREE), CPU, 1, rate(0.8))
    assert simulation.run(600).steps["plain"] < 24
    many = Simulation(simulation.policy, CPU, 32, rate(0.8))
    plain = fixed(PLAIN, CPU, 32, rate(0.8), 600)
    assert many.run(600).rate >= 0.97 * plain
    few = Simulation(simulation.policy, CPU, 1, rate(0.8)).run(600)
    assert few.rate >= 1.3 * fixed(PLAIN, CPU, 1, rate(0.8), 600)


def test_one_request_that_drafts_badly_is_told_from_the_others():
    """Alone it is decoded plainly, among good ones it is not in their way."""
    policy = AdaptiveShape(TREE)
    Simulation(policy, GPU, 8, rate(0.85)).run(600)
    alone = Simulation(policy, CPU._replace(plain=GPU.plain), 1, rate(0.0)).run(120)
    assert alone.steps["plain"] > 0.8 * 120
    mixed = Simulation(policy, GPU, 8, lambda request, position: 0.85 * (request % 8 > 0)).run(600)
    assert mixed.steps["plain"] < 0.1 * sum(mixed.steps.values())


@pytest.mark.parametrize("accepted", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_other_users_of_the_machine_do_not_mislead_it(accepted, seed):
    """Spells in which every step is up to three times slower, and stalls."""
    given = (GPU, 8, rate(accepted), 1500)
    best = max(fixed(shape, *given, seed=seed) for shape in candidate_shapes(TREE))
    assert adaptive(*given, seed=seed, noise=Noise(seed)).rate >= 0.93 * best


def test_a_first_step_that_compiles_for_seconds_does_not_rule_a_shape_out():
    class Compiling(Noise):
        def slower_than(self, seconds: float) -> float:
            return 1.0 if (new := round(seconds, 6)) in seen else seen.append(new) or 1000.0

    seen: list[float] = []
    run = adaptive(GPU, 8, rate(0.9), 1500, noise=Compiling(0))
    assert run.rate >= 2 * fixed(PLAIN, GPU, 8, rate(0.9), 1500)


def test_a_bad_first_moment_is_not_believed_for_ever():
    """Each larger shape is far too slow when it is first tried, and never again."""

    class BadStart(Noise):
        def slower_than(self, seconds: float) -> float:
            seen[round(seconds, 6)] += 1
            large = seconds > 1.2 * GPU.plain(1)
            return 6.0 if large and seen[round(seconds, 6)] <= 5 else 1.0

    seen: Counter[float] = Counter()
    simulation = Simulation(AdaptiveShape(TREE), GPU, 1, rate(0.9), noise=BadStart(0))
    simulation.run(6000)
    best = max(fixed(shape, GPU, 1, rate(0.9), 1500) for shape in candidate_shapes(TREE))
    assert simulation.run(1500).rate >= 0.95 * best


# ── how it goes about it ─────────────────────────────────────────────────────────────────────


def test_the_same_steps_give_the_same_choices():
    one, two = (adaptive(CPU, 8, rate(0.6), 600, noise=Noise(1)) for _ in range(2))
    assert one.choices == two.choices


def test_candidates_are_trees_that_can_be_formed_and_no_larger_than_the_configured_one():
    for topk in (1, 2, 4, 10):
        for depth in (1, 2, 3, 5, 8):
            for nodes in (2, 3, 6, 8, 16, 40, 64):
                shape = TreeShape(topk, depth, nodes)
                if shape.problems():
                    continue
                found = candidate_shapes(shape)
                assert found[0] == PLAIN and shape in found
                assert len(found) == len(set(found)) <= 6
                for each in found[1:]:
                    assert not each.problems()
                    assert each.topk <= topk and each.depth <= depth and each.nodes <= nodes


def test_without_step_times_it_decodes_plainly():
    policy = AdaptiveShape(TREE)
    request = RequestDrafts()
    for _ in range(50):
        choice = policy.choose([request], [])
        assert not choice.untracked
        assert choice.shape == PLAIN
        policy.observe(choice, [Outcome(request, 1)], 0.0)


def test_catching_up_after_plain_steps_is_not_taken_for_the_shape():
    slow = GPU._replace(catching_up=20.0, following=0.0)
    simulation = Simulation(AdaptiveShape(TREE), slow, 8, rate(0.9))
    run = simulation.run(1500)
    assert sum(choice.catches_up for choice in run.choices) >= 3
    times = simulation.policy.times
    for shape in candidate_shapes(TREE):
        assert not times.has_samples(shape) or times.of(shape, 8) == slow.seconds(
            shape, 8, missed=0
        )


def test_fixed_and_adaptive_are_chosen_by_the_flags():
    tree = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "head"}
    policy = shape_policy(EngineConfig(**tree))
    assert (
        isinstance(policy, AdaptiveShape) and policy.shapes[-1] == EngineConfig(**tree).tree_shape
    )
    policy = shape_policy(EngineConfig(**tree, speculative_adaptive=False))
    assert policy.choose([RequestDrafts()], []) == Choice(EngineConfig(**tree).tree_shape)
    policy = shape_policy(EngineConfig(speculative_algorithm="NONE"))
    assert not policy.adaptive and policy.choose([RequestDrafts()], []) == Choice(PLAIN)


def test_choosing_changes_no_request():
    """A decision may come to nothing: the plan that it was made for need not be sent."""
    simulation = Simulation(AdaptiveShape(TREE), GPU, 4, rate(0.0))
    while not simulation.policy.disabled:
        simulation.run(1)
    policy, probe = simulation.policy, RequestDrafts(probe=True)
    requests = [RequestDrafts(), probe, RequestDrafts(tracked=False), RequestDrafts()]
    before = [dataclasses.replace(request) for request in requests]
    for _ in range(20):
        assert policy.choose(requests, []).untracked == [0, 3]
        assert requests == before
    policy.untrack(requests[0])
    assert policy.choose(requests, []).untracked == [3]


def test_state_tells_what_was_chosen():
    simulation = Simulation(AdaptiveShape(TREE), GPU, 8, rate(0.9))
    run = simulation.run(600)
    state = simulation.policy.state()
    assert state.adaptive and state.current == run.choices[-1].shape.name
    assert {name: use.steps for name, use in state.shapes.items()} == dict(run.steps)
    tree = state.shapes["2x5x8"]
    assert tree.accept_length == pytest.approx(4.3, abs=0.5)
    assert tree.step_ms == pytest.approx(1000 * GPU.seconds(TREE, 8, 0), rel=0.1)
    assert state.shapes["plain"].accept_length == 1.0
