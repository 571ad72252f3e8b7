"""What is learned from steps: their times, and how many drafts are accepted."""

from __future__ import annotations

import pytest

from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.scheduler.estimates import Acceptance, RequestDrafts, StepTimes

CHAIN, TREE = TreeShape(1, 3, 4), TreeShape(2, 5, 8)


def observe(times: StepTimes, shape: TreeShape, batch: int, *seconds: float) -> None:
    for each in seconds:
        times.observe(shape, batch, each / times.pace)


# ── step times ───────────────────────────────────────────────────────────────────────────────


def test_one_stall_or_compilation_moves_no_estimate():
    times = StepTimes()
    observe(times, PLAIN, 4, 500.0, 1.0)
    assert times.of(PLAIN, 4) == 1.0
    observe(times, TREE, 4, 2.0, 2.0, 90.0, 2.0)
    assert times.of(TREE, 4) == pytest.approx(2.0, rel=0.1)


def test_other_batch_sizes_are_interpolated_and_beyond_them_guessed():
    times = StepTimes()
    for batch, seconds in (1, 1.0), (4, 2.0), (16, 8.0):
        observe(times, PLAIN, batch, seconds)
    found = [times.of(PLAIN, batch) for batch in (1, 2, 4, 10, 16)]
    assert found == pytest.approx([1.0, 4 / 3, 2.0, 5.0, 8.0])
    assert 8.0 < times.of(PLAIN, 32) < 16.0
    assert times.of(TREE, 4) > times.of(CHAIN, 4) > 2.0  # none was ever measured
    observe(times, CHAIN, 4, 3.2)  # 3 nodes and 3 drafting steps: 1.2 more than a plain step
    assert times.of(TREE, 4) == pytest.approx(2.0 + 1.2 * 12 / 6)
    assert times.of(CHAIN, 16) == pytest.approx(3.2 * 8.0 / 2.0)


def test_a_step_with_drafts_is_never_taken_to_be_cheaper_than_a_plain_one():
    """Else nothing accepted would look fine, if plain steps were measured in a bad moment."""
    times = StepTimes()
    observe(times, PLAIN, 1, 3.0, 3.0)
    observe(times, CHAIN, 1, 1.2, 1.2)
    assert times.of(CHAIN, 1) == times.of(PLAIN, 1)


def test_a_machine_that_becomes_slower_makes_no_shape_look_worse_than_another():
    times = StepTimes()
    observe(times, PLAIN, 1, *[1.0] * 9)
    observe(times, TREE, 1, *[2.0] * 200)
    observe(times, TREE, 1, *[6.0] * 20)  # three times slower, while it is the only one to run
    assert times.pace == pytest.approx(3.0, rel=0.01)
    observe(times, PLAIN, 1, 3.0, 3.0)
    observe(times, TREE, 1, *[2.0] * 200)  # as fast as before
    assert times.of(TREE, 1) / times.of(PLAIN, 1) == pytest.approx(2.0, rel=0.05)


def test_a_shape_measured_once_in_a_bad_moment_is_hoped_to_be_better():
    times = StepTimes()
    observe(times, PLAIN, 1, 1.0, 1.0)
    observe(times, CHAIN, 1, 1.3, 1.3)
    observe(times, TREE, 1, 9.0)
    assert times.of(TREE, 1) == 9.0
    assert times.optimistic(TREE, 1) == pytest.approx(1.0 + 0.3 * 12 / 6)
    observe(times, TREE, 1, 8.0, 8.0)
    assert times.optimistic(TREE, 1) == times.of(TREE, 1) == 8.0
    observe(times, PLAIN, 1, *[1.0] * 600)  # long ago
    assert times.optimistic(TREE, 1) < 2.0


# ── acceptance ───────────────────────────────────────────────────────────────────────────────


def test_expected_drafts_are_those_seen():
    seen = Acceptance()
    for _ in range(60):
        seen.observe(TREE, [0, 5, 3, 2])
    assert seen.of(TREE).mean == pytest.approx(2.5, rel=0.05)
    assert seen.of(TREE).error < 0.2 and seen.of(PLAIN).mean == 0.0


def test_a_chain_tells_of_shorter_and_longer_ones():
    seen = Acceptance()
    for _ in range(60):
        seen.observe(CHAIN, [3, 3, 1, 0])
    assert seen.of(TreeShape(1, 1, 2)).mean == pytest.approx(0.75, rel=0.05)
    assert seen.of(TreeShape(1, 2, 3)).mean == pytest.approx(0.75 + 0.5, rel=0.05)
    longer = seen.of(TreeShape(1, 5, 6))
    assert 1.75 < longer.mean < 2.75
    assert longer.samples == 0 < seen.of(CHAIN).samples  # guessed
    assert longer.error > seen.of(CHAIN).error


def test_nothing_accepted_leaves_little_hope_and_plain_steps_bring_it_back():
    seen = Acceptance()
    before = seen.of(TREE)
    for _ in range(4):
        seen.observe(CHAIN, [0] * 8)
    for shape in (CHAIN, TREE):
        assert seen.of(shape).mean < 0.3
    for _ in range(1000):
        seen.observe(PLAIN, [0])
    after = seen.of(TREE)
    assert after.mean == pytest.approx(before.mean, rel=0.05)
    assert after.error == pytest.approx(before.error, rel=0.05)


def test_a_request_is_like_the_others_until_it_shows_otherwise():
    drafts = RequestDrafts()
    assert drafts.ratio == 1.0
    drafts.observe(0, 3.0)
    assert 0.5 < drafts.ratio < 1.0
    for _ in range(30):
        drafts.observe(0, 3.0)
    assert drafts.ratio < 0.15
    for _ in range(100):
        drafts.observe(3, 3.0)
    assert drafts.ratio == pytest.approx(1.0, rel=0.05)
