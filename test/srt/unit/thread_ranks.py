"""Ranks as threads of one process: the same runners as a server's, with a group that needs no
sockets.

One rank runs at a time; at each operation of the group the others get their turns. So no kernel
runs twice at once, and a test is as reproducible as with one rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import Plan, StepResult
from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.runner.model_runner import ModelRunner

T = TypeVar("T")
WAIT_SECONDS = 60  # for another rank; a longer wait is a test that hangs


class Meeting:
    """Where the ranks hand their tensors to each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS)
        self.turn = threading.Lock()
        self.given: list[Any] = [None] * size
        self.operations = 0

    def exchange(self, rank: int, x: Tensor, name: str) -> list[Tensor]:
        """What all ranks have given, by rank. Each must call the same operation."""
        self.given[rank] = (name, x.clone())
        self.turn.release()
        try:
            self.barrier.wait()
            given = list(self.given)
            self.barrier.wait()
        finally:
            self.turn.acquire()
        self.operations += rank == 0
        kinds = {(n, tuple(part.shape), part.dtype) for n, part in given}
        assert len(kinds) == 1, f"ranks called different operations: {kinds}"
        return [part for _, part in given]


class ThreadGroup(Group):
    def __init__(self, meeting: Meeting, shard: Shard) -> None:
        super().__init__(shard, torch.device("cpu"))
        self.meeting = meeting

    def _all(self, x: Tensor, name: str) -> list[Tensor]:
        assert x.is_contiguous()
        return self.meeting.exchange(self.rank, x, name)

    def _sum(self, x: Tensor) -> Tensor:
        first, *others = self._all(x, "sum")
        for other in others:
            first = first + other
        return first

    def _max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x, "max")).amax(0)

    def _gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x, "gather"))

    def _from_first(self, x: Tensor) -> Tensor:
        return self._all(x, "from_first")[0].clone()

    def close(self) -> None: ...


class ThreadRanks:
    """Does the same on all ranks, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self.meeting = Meeting(size)
        self.groups = [ThreadGroup(self.meeting, Shard(rank, size)) for rank in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def run(self, work: Callable[[ThreadGroup], T]) -> list[T]:
        """What ``work`` returns on each rank. The first failure is raised."""
        futures = [self.pool.submit(self._turn, work, group) for group in self.groups]
        failures = [f.exception() for f in futures]
        for failure in failures:
            if failure is not None and not isinstance(failure, threading.BrokenBarrierError):
                self.meeting.barrier.reset()
                raise failure
        return [future.result() for future in futures]

    def _turn(self, work: Callable[[ThreadGroup], T], group: ThreadGroup) -> T:
        with self.meeting.turn:
            try:
                return work(group)
            except BaseException:
                self.meeting.barrier.abort()
                raise


class Done:
    def __init__(self, result: StepResult) -> None:
        self.value = result

    def result(self) -> StepResult:
        return self.value


class RunnerRanks:
    """The runners of all ranks, as one: what the scheduler, or runner_harness.Engine, sees."""

    overlaps = False

    def __init__(self, config: EngineConfig, size: int) -> None:
        self.ranks = ThreadRanks(size)
        self.runners = self.ranks.run(lambda group: ModelRunner(config, group))

    def __getattr__(self, name: str) -> Any:
        """What rank 0's runner has, its pools for example."""
        return getattr(self.runners[0], name)

    def launch(self, plan: Plan) -> Done:
        return Done(self.execute(plan))

    def execute(self, plan: Plan) -> StepResult:
        """All ranks execute the plan, and find the same."""
        results = self.ranks.run(lambda group: self.runners[group.rank].execute(plan))
        first, *others = map(comparable, results)
        for other in others:
            assert other == first, "ranks found different results"
        return results[0]


def comparable(result: StepResult) -> Any:
    """Without times, which differ, and without the scores in traces, which rank 0 alone reports."""
    plain = msgspec.to_builtins(result)
    for name in ("seconds", "decode_seconds", "idle_seconds"):
        plain.pop(name, None)
    for decoded in plain.get("decode", []):
        if decoded.get("trace"):
            decoded["trace"][2] = None
    return plain
