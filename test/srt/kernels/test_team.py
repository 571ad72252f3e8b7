"""A team of threads: each unit of each call is computed once, in the order of the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mamba_eagle.cpu import team
from mamba_eagle.cpu.abi import Block, CallRow, fields, ints, reader
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.team import MIN_SHARED, Program

pytestmark = pytest.mark.skipif(not team.can_sleep(), reason="there are no teams here")

UNITS = 70


class Numbers(Block):
    _fields_ = fields("numbers[70] rows")  # int64


numbers_at = reader(Numbers)


def _double(arguments, first, last):  # noqa: ANN001, ANN202
    """numbers[u] = 2 · numbers[u] + rows"""
    own = numbers_at(arguments)
    numbers = ints(own.numbers, 70)
    for unit in range(first, last):
        numbers[unit] = 2 * numbers[unit] + own.rows


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
        self.block = Numbers(self.numbers.ctypes.data)
        common = {"function": DOUBLE.address, "arguments": self.block.address}
        common["rows_at"] = self.block.address + Numbers.rows.offset
        self.program = Program(
            [
                CallRow(**common, units=UNITS, work=MIN_SHARED),
                CallRow(**common, units_per_row=UNITS, work=0),
                CallRow(**common, units_per_request=UNITS // 2, work_per_row=MIN_SHARED),
            ]
        )

    def run(self) -> None:
        self.numbers[:] = 0
        self.program.run(1, 2)
        assert (self.numbers == 7).all()


def test_each_unit_is_computed_once(workers: None) -> None:
    doubling = Doubling()
    for _ in range(300):
        doubling.run()
    assert team.share(DOUBLE.address, doubling.block.address, UNITS)
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
        assert not team.share(DOUBLE.address, doubling.block.address, UNITS)


def test_a_team_ends_with_its_threads() -> None:
    before = threading.active_count()
    team.gather(3)
    assert threading.active_count() == before + 2
    team.gather(1)
    assert threading.active_count() == before
