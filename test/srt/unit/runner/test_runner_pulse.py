"""What counts as progress of the runner's main thread."""

from __future__ import annotations

import pprint
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mamba_eagle.message import BEAT_SECONDS
from mamba_eagle.runner.pulse import Pulse, running_children

SAMPLES = 6
STUCK = (SAMPLES - 2) * BEAT_SECONDS
MAX_SAMPLES = 100  # on a busy machine a thread takes some looks to get to where it hangs


@contextmanager
def working(work: Callable[[Pulse, threading.Event], None], on_cpu: bool) -> Iterator[Pulse]:
    """A thread that plays the main thread; it works until the block ends."""
    made: list[Pulse] = []
    ready, stop = threading.Event(), threading.Event()

    def main() -> None:
        made.append(Pulse("", computes_on_cpu=on_cpu))
        ready.set()
        work(made[0], stop)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(60)
    time.sleep(0.02)
    try:
        yield made[0]
    finally:
        stop.set()
        thread.join()


def gets_stuck(pulse: Pulse, seconds: float = STUCK, between: float = BEAT_SECONDS) -> bool:
    """Whether it does so after some looks, as if ``between`` seconds had passed between two."""
    for _ in range(MAX_SAMPLES):
        if pulse.sample(between).stuck_seconds >= seconds:
            return True
        time.sleep(0.03)
    return False


def let_compute(seconds: float) -> None:
    """Until the other threads have had so much processor time, however busy the machine is."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        time.sleep(0.01)


def idle(pulse: Pulse, stop: threading.Event) -> None:
    stop.wait()


def hang_in_a_step(pulse: Pulse, stop: threading.Event) -> None:
    with pulse.launching():
        stop.wait()


def wait_for_the_device(pulse: Pulse, stop: threading.Event) -> None:
    """As the main loop does: its stack changes all the time."""
    with pulse.launching():
        pass
    while not stop.is_set():
        time.sleep(1e-4)


def compute(pulse: Pulse, stop: threading.Event) -> None:
    with pulse.launching():
        while not stop.is_set():
            pprint.pformat([{"a": [number, [number]]} for number in range(20)])


def compute_in_one_call(pulse: Pulse, stop: threading.Event) -> None:
    """The Python stack stays the same: as in a matrix product that takes minutes."""
    helper = threading.Thread(target=compute, args=(Pulse("", computes_on_cpu=True), stop))
    with pulse.launching():
        helper.start()
        helper.join()


def compile_a_kernel(pulse: Pulse, stop: threading.Event) -> None:
    with pulse.launching():
        compiler = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stop.wait()
        compiler.communicate(b"\n")


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("work", [hang_in_a_step, wait_for_the_device])
def test_a_step_that_shows_nothing_is_stuck(work, on_cpu: bool, monkeypatch) -> None:
    # The process that runs the tests has other threads, whose CPU time would be progress.
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    with working(work, on_cpu) as pulse:
        assert gets_stuck(pulse)
        pulse.step_ended()
        assert pulse.sample(BEAT_SECONDS).stuck_seconds == 0


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("work", [idle, compile_a_kernel, compute])
def test_work_and_idleness_are_not_stuck(work, on_cpu: bool) -> None:
    with working(work, on_cpu) as pulse:
        for _ in range(SAMPLES):
            if work is compute:
                let_compute(0.02)  # so much that it is seen in another place
            else:
                time.sleep(0.05)
            beat = pulse.sample(BEAT_SECONDS)
        assert beat.stuck_seconds < STUCK
        assert beat.busy == (work is not idle)


def test_cpu_time_is_progress_on_a_cpu_only() -> None:
    """A GPU's driver spins while it waits for a device that hangs."""
    moment = 0.001
    stuck = (SAMPLES - 2) * moment
    with working(compute_in_one_call, on_cpu=True) as pulse:
        for _ in range(SAMPLES):
            assert pulse.sample(moment).stuck_seconds < stuck
            let_compute(0.02)
    with working(compute_in_one_call, on_cpu=False) as pulse:
        assert gets_stuck(pulse, stuck, moment)


def test_a_child_that_ran_before_the_step_is_not_its_compiler() -> None:
    """As multiprocessing's resource tracker, which lives as long as its process."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with working(hang_in_a_step, on_cpu=False) as pulse:
            assert gets_stuck(pulse)
    finally:
        child.communicate(b"\n")


def test_an_ended_child_that_nobody_waited_for_does_not_count() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # until it has ended
    deadline = time.monotonic() + 60
    while child.pid in running_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid not in running_children()
    child.wait()
