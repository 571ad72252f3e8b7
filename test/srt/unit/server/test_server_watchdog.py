"""What the watchdog concludes from heartbeats."""

from __future__ import annotations

import pytest

from mamba_eagle.message import Heartbeat
from mamba_eagle.server.engine.children import MAX_TIMEOUTS_PER_STEP, Watchdog

TIMEOUT = 10.0


def scheduler(**fields) -> Heartbeat:
    return Heartbeat(role="scheduler", **fields)


def runner(**fields) -> Heartbeat:
    return Heartbeat(role="runner", **fields)


def run(watchdog: Watchdog, seconds: float, *beats: Heartbeat) -> str | None:
    """Each second brings ``beats``; the first problem."""
    for _ in range(int(seconds)):
        for beat in beats:
            watchdog.heard(beat)
        if (problem := watchdog.tick(1.0)) is not None:
            return problem
    return None


def test_an_idle_engine_that_answers_is_well() -> None:
    assert run(Watchdog(TIMEOUT), 100 * TIMEOUT, scheduler(), runner()) is None


@pytest.mark.parametrize("silent", ["scheduler", "runner"])
@pytest.mark.parametrize("busy", [False, True])
def test_silence_is_noticed_at_the_timeout_and_not_before(silent: str, busy: bool) -> None:
    watchdog = Watchdog(TIMEOUT)
    beats = [scheduler(busy=busy), runner(busy=busy)]
    assert run(watchdog, 3, *beats) is None
    others = [beat for beat in beats if beat.role != silent]
    assert run(watchdog, TIMEOUT - 2, *others) is None
    assert f"the {silent} process has not answered" in (run(watchdog, 3, *others) or "")


def test_silence_is_named_sooner_where_that_is_asked_for() -> None:
    watchdog = Watchdog(TIMEOUT)
    run(watchdog, TIMEOUT / 2, scheduler())
    assert watchdog.silent(TIMEOUT / 2) == "the runner process has not answered for 5 s"
    assert watchdog.silent(TIMEOUT) is None and watchdog.silent(0) is None
    watchdog.heard(runner())
    assert watchdog.silent(TIMEOUT / 2) is None


def test_a_process_that_never_answers_is_noticed() -> None:
    assert "scheduler" in (run(Watchdog(TIMEOUT), TIMEOUT + 1, runner()) or "")


def test_a_heartbeat_ends_the_silence() -> None:
    watchdog = Watchdog(TIMEOUT)
    for _ in range(5):
        assert run(watchdog, TIMEOUT - 2) is None
        assert run(watchdog, 1, scheduler(), runner()) is None


def test_a_long_step_that_makes_progress_is_no_problem() -> None:
    long_step = [scheduler(busy=True, steps=7), runner(busy=True, steps=6)]
    watchdog = Watchdog(TIMEOUT)
    assert run(watchdog, (MAX_TIMEOUTS_PER_STEP - 1) * TIMEOUT, *long_step) is None
    next_step = [scheduler(busy=True, steps=8), runner(busy=True, steps=7)]
    assert run(watchdog, (MAX_TIMEOUTS_PER_STEP - 1) * TIMEOUT, *next_step) is None
    assert "single step" in (run(watchdog, 2 * TIMEOUT, *next_step) or "")


def test_a_step_without_progress_is_noticed() -> None:
    watchdog = Watchdog(TIMEOUT)
    busy = scheduler(busy=True, steps=7)
    assert run(watchdog, 1, busy, runner(busy=True, steps=6, stuck_seconds=TIMEOUT - 1)) is None
    problem = run(watchdog, 1, busy, runner(busy=True, steps=6, stuck_seconds=TIMEOUT))
    assert "the runner process has made no progress" in (problem or "")


def test_requests_that_wait_while_nothing_runs_are_noticed() -> None:
    watchdog = Watchdog(TIMEOUT)
    # Steps are so short that the runner is always seen between two of them.
    for steps in range(1, 101):
        assert run(watchdog, 1, scheduler(busy=True, steps=steps), runner(steps=steps)) is None
    stalled = [scheduler(busy=True, steps=100), runner(steps=100)]
    assert run(watchdog, TIMEOUT - 2, *stalled) is None
    assert "requests have waited" in (run(watchdog, 3, *stalled) or "")


def test_a_process_that_falls_silent_at_work_is_the_one_that_is_named() -> None:
    """The scheduler no longer plans and the runner becomes idle: neither is the cause."""
    watchdog = Watchdog(TIMEOUT)
    between_steps = [scheduler(busy=True, steps=7), runner(steps=7)]
    assert run(watchdog, TIMEOUT / 2, *between_steps) is None
    problem = run(watchdog, 2 * TIMEOUT, runner(steps=7))
    assert problem == f"the scheduler process has not answered for {TIMEOUT:g} s"


def test_a_timeout_of_zero_switches_it_off() -> None:
    assert run(Watchdog(0), 1000, runner(busy=True, stuck_seconds=1000)) is None


def test_a_silent_rank_is_named_and_not_those_that_wait_for_it() -> None:
    watchdog = Watchdog(TIMEOUT, ranks=3)
    well = [scheduler(busy=True, steps=7), runner(busy=True), runner(busy=True, rank=1)]
    assert run(watchdog, 3, *well, runner(busy=True, rank=2)) is None
    waiting = [runner(busy=True, stuck_seconds=TIMEOUT, rank=rank) for rank in (0, 1)]
    assert run(watchdog, TIMEOUT - 2, *well) is None
    problem = run(watchdog, 2, well[0], *waiting)
    assert problem == f"the runner2 process has not answered for {TIMEOUT:g} s"


def test_a_rank_that_never_got_a_plan_is_named_and_not_those_that_wait_for_it() -> None:
    watchdog = Watchdog(TIMEOUT, ranks=2)
    problem = None
    for second in range(int(TIMEOUT) + 5):
        waiting = runner(busy=True, steps=6, stuck_seconds=max(0, second - 1))
        idle = runner(rank=1)
        problem = problem or run(watchdog, 1, scheduler(busy=True, steps=7), waiting, idle)
    assert problem is not None and "although the runner1 process is idle" in problem
