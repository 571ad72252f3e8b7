"""A team of threads: each unit of each call is computed once, in the order of the calls."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mamba_eagle.kernels import numba_team as team
from mamba_eagle.kernels.numba_math import numba
from mamba_eagle.kernels.numba_team import MIN_SHARED, Program, call_row
from mamba_eagle.kernels.vector_code import SpanKernel, pointer_to

pytestmark = pytest.mark.skipif(not team.can_sleep(), reason="there are no teams here")

UNITS = 70


def _double(arguments, first, last):  # noqa: ANN001, ANN202
    """numbers[u] = 2 · numbers[u] + 1, and how often that was called. Words: numbers, rows."""
    words = numba.carray(pointer_to(arguments), 2, np.int64)
    numbers = numba.carray(pointer_to(words[0]), 70, np.int64)
    for unit in range(first, last):
        numbers[unit] = 2 * numbers[unit] + words[1]


DOUBLE = SpanKernel(_double)


@pytest.fixture(params=[2, 5])
def workers(request: pytest.FixtureRequest) -> Iterator[None]:
    team.gather(request.param)
    yield
    team.gather(1)


class Doubling:
    """A program of three such calls: one for all, one for the leader alone, one for all."""

    def __init__(self) -> None:
        DOUBLE.prepare()
        self.numbers = np.zeros(UNITS, np.int64)
        self.words = (ctypes.c_int64 * 2)(self.numbers.ctypes.data, 0)
        given = (DOUBLE.address, ctypes.addressof(self.words))
        rows = [
            call_row(*given, units=UNITS, rows_at=1, work=MIN_SHARED),
            call_row(*given, units_per_row=UNITS, rows_at=1, work=0),
            call_row(*given, units_per_request=UNITS // 2, rows_at=1, work_per_row=MIN_SHARED),
        ]
        self.program = Program(np.array(rows, np.int64))

    def run(self) -> None:
        self.numbers[:] = 0
        self.program.run(1, 2)
        assert (self.numbers == 7).all()


def test_each_unit_is_computed_once(workers: None) -> None:
    doubling = Doubling()
    for _ in range(300):
        doubling.run()
    assert team.share(DOUBLE.address, ctypes.addressof(doubling.words), UNITS)
    assert (doubling.numbers == 15).all()


def test_workers_that_sleep_are_woken(workers: None) -> None:
    doubling = Doubling()
    control = team._team.control
    for _ in range(3):
        deadline = time.monotonic() + 60
        while not control[team.SLEEPERS] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert control[team.SLEEPERS]
        epoch = int(control[team.EPOCH])
        doubling.run()
        assert control[team.EPOCH] > epoch


def test_two_leaders_do_not_wait_for_each_other(workers: None) -> None:
    """The second one works alone."""
    doubling = Doubling()
    with team._leading:
        doubling.run()
        assert not team.share(DOUBLE.address, ctypes.addressof(doubling.words), UNITS)


def test_a_team_ends_with_its_threads() -> None:
    before = threading.active_count()
    team.gather(3)
    assert threading.active_count() == before + 2
    team.gather(1)
    assert threading.active_count() == before
