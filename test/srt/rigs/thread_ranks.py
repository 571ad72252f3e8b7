"""Ranks as threads of one process: the same runners as a server's, with a group that needs no
sockets.

One rank runs at a time; at each operation of the group the others get their turns. So no kernel
runs twice at once, and a test is as reproducible as with one rank.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import Plan, StepResult
from mamba_eagle.parallel.groups import ALONE, Channel, Group
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.ranks import Ranks

T = TypeVar("T")
WAIT_SECONDS = 240  # for another rank, which may compile; a longer wait is a test that hangs
MAX_DELAY = 0.0005  # seconds
COPIES = ("copied", "lost", "problems")  # of the cache's tiers, which end beside the steps


class Meeting:
    """Where the ranks hand their tensors to each other."""

    def __init__(self, size: int, turn: threading.Lock | threading.Semaphore) -> None:
        """turn: held by the one rank that runs."""
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS)
        self.turn = turn
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


class Post:
    """Where one pipeline stage leaves tensors for another; each gets them in the order in which
    they were left. ``delays``: seconds that a message may take at most, drawn for each."""

    def __init__(self, turn: threading.Lock) -> None:
        self.turn, self.failed = turn, threading.Event()
        self.boxes: dict[tuple[int, int, Channel], queue.Queue[Tensor]] = {}
        self.guard = threading.Lock()
        self.delays: tuple[random.Random, float] | None = None
        # may change what a stage receives: (stage, kind, tensor) -> tensor
        self.tamper: Callable[[int, Channel, Tensor], Tensor] = lambda stage, kind, x: x

    def box(self, source: int, goal: int, kind: Channel) -> queue.Queue[Tensor]:
        with self.guard:
            return self.boxes.setdefault((source, goal, kind), queue.Queue())

    def send(self, source: int, goal: int, kind: Channel, x: Tensor) -> None:
        self.box(source, goal, kind).put(x.clone())

    def receive(self, source: int, goal: int, kind: Channel, like: Tensor) -> Tensor:
        box = self.box(source, goal, kind)
        self.turn.release()
        try:
            if self.delays is not None:
                rng, most = self.delays
                time.sleep(rng.random() * most)
            x = self._wait(box)
        finally:
            self.turn.acquire()
        x = self.tamper(goal, kind, x)
        assert (x.shape, x.dtype) == (like.shape, like.dtype), "stages differ in what they send"
        return x

    def _wait(self, box: queue.Queue[Tensor]) -> Tensor:
        for _ in range(WAIT_SECONDS * 20):
            try:
                return box.get(timeout=0.05)
            except queue.Empty:
                if self.failed.is_set():
                    raise threading.BrokenBarrierError from None
        raise AssertionError("a stage has waited too long for a message")


class ThreadGroup(Group):
    stages: Group = ALONE
    beside: Group = ALONE
    number = 0  # among all ranks of all stages

    def __init__(self, meeting: Meeting, shard: Shard, post: Post | None = None) -> None:
        super().__init__(shard, torch.device("cpu"))
        self.meeting, self.post = meeting, post

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

    def _from_last(self, x: Tensor, channel: Channel) -> Tensor:
        assert self.post is not None
        last = self.size - 1
        if self.rank < last:
            return self.post.receive(last, self.rank, channel, x)
        for stage in range(last):
            self.post.send(last, stage, channel, x)
        return x

    def _hand_on(self, x: Tensor) -> None:
        assert self.post is not None
        self.post.send(self.rank, self.rank + 1, Channel.HIDDEN, x)

    def _take(self, room: Tensor) -> Tensor:
        assert self.post is not None
        return self.post.receive(self.rank - 1, self.rank, Channel.HIDDEN, room)

    def _collect(self, x: Tensor) -> list[Tensor] | None:
        every = self._all(x, "collect")
        return every if self.rank == 0 else None

    def _hand_out(self, parts: list[Tensor] | None, room: Tensor) -> Tensor:
        given = torch.stack(parts) if parts is not None else room.expand(self.size, *room.shape)
        return self._all(given.contiguous(), "hand_out")[0][self.rank].clone()

    def close(self) -> None: ...


class ThreadRanks:
    """Does the same on all ranks, each in a thread of its own: ``size`` of them in each stage."""

    def __init__(self, size: int, stages: int = 1) -> None:
        self.turn = threading.Lock()
        self.meetings = [Meeting(size, self.turn) for _ in range(stages)]
        self.meeting = self.meetings[0]
        self.groups = [
            ThreadGroup(meeting, Shard(rank, size))
            for meeting in self.meetings
            for rank in range(size)
        ]
        self.posts = [Post(self.turn) for _ in range(size)]
        threads = Meeting(size * stages, threading.Semaphore(size * stages))  # they take no turns
        columns = [Meeting(stages, self.turn) for _ in range(size)] if stages > 1 else []
        for number, group in enumerate(self.groups):
            group.number = number
            if size * stages > 1:
                group.beside = ThreadGroup(threads, Shard(number, size * stages))
            if stages > 1:
                shard, part = Shard(number // size, stages), number % size
                group.stages = ThreadGroup(columns[part], shard, self.posts[part])
        self.meetings += [*columns, threads]
        self.pool = ThreadPoolExecutor(size * stages)

    def run(self, work: Callable[[ThreadGroup], T]) -> list[T]:
        """What ``work`` returns on each rank. The first failure is raised."""
        futures = [self.pool.submit(self._turn, work, group) for group in self.groups]
        failures = [f.exception() for f in futures]
        for failure in failures:
            if failure is not None and not isinstance(failure, threading.BrokenBarrierError):
                for meeting in self.meetings:
                    meeting.barrier.reset()
                for post in self.posts:
                    post.failed.clear()
                    post.boxes.clear()
                raise failure
        return [future.result() for future in futures]

    def _turn(self, work: Callable[[ThreadGroup], T], group: ThreadGroup) -> T:
        with self.turn:
            try:
                return work(group)
            except BaseException:
                for meeting in self.meetings:
                    meeting.barrier.abort()
                for post in self.posts:
                    post.failed.set()
                raise


class Done:
    def __init__(self, result: StepResult) -> None:
        self.value = result

    def result(self) -> StepResult:
        return self.value


class RunnerRanks:
    """The runners of all ranks, as one: what the scheduler, or runner_harness.Engine, sees."""

    overlaps = False
    compares_stages = True  # what they have accepted, with each result

    def __init__(self, config: EngineConfig, size: int, stages: int = 1) -> None:
        self.ranks = ThreadRanks(size, stages)
        self.answering = size * (stages - 1)
        self.runners = self.ranks.run(lambda group: self._assemble(config, group))

    @staticmethod
    def _assemble(config: EngineConfig, group: ThreadGroup) -> ModelRunner:
        return assemble(config, Ranks(group, group.stages, group.beside))

    def __getattr__(self, name: str) -> Any:
        """What the answering rank's runner has, its pools for example."""
        return getattr(self.runners[self.answering], name)

    def launch(self, plan: Plan) -> Done:
        return Done(self.execute(plan))

    def retire(self) -> None:
        self.ranks.run(lambda group: self.runners[group.number].retire())

    def execute(self, plan: Plan) -> StepResult:
        """All ranks execute the plan, and find the same."""
        results = self.ranks.run(lambda group: self.runners[group.number].execute(plan))
        first, *others = map(comparable, results[self.answering :])
        for other in others:
            assert other == first, "ranks found different results"
        for earlier in results[: self.answering] if self.compares_stages else ():
            assert paths(earlier) == paths(results[self.answering]), "stages accepted other nodes"
        return results[self.answering]


Step = tuple[Plan, StepResult]


class Recorder:
    """A runner that keeps what it was asked and what it answered."""

    overlaps = False

    def __init__(self, runner: Any) -> None:
        self.runner, self.ready = runner, runner.ready
        self.steps: list[Step] = []

    def launch(self, plan: Plan) -> Any:
        launched = self.runner.launch(plan)
        self.steps.append((plan, launched.result()))
        return launched


def replay(steps: list[Step], runner: RunnerRanks) -> None:
    """Raises: AssertionError at the first result that is not the recorded one, bit for bit."""
    for plan, expected in steps:
        found = comparable(runner.execute(plan))
        assert found == comparable(expected), f"step {plan.step} differs"


class WorkingRanks(RunnerRanks):
    """Ranks that work at the same time, as the processes of a server do: each executes the plans
    that have come, and sees no others before. To be closed."""

    overlaps = True

    def __init__(
        self, config: EngineConfig, stages: int, size: int = 1, delays: random.Random | None = None
    ) -> None:
        """delays: draws what messages and plans take, up to ``MAX_DELAY``."""
        super().__init__(config, size, stages)
        self.delays = delays
        for post in self.ranks.posts if delays else ():
            post.delays = (delays, MAX_DELAY)
        self.plans: list[queue.Queue[Plan | None]] = [queue.Queue() for _ in self.runners]
        self.results: queue.Queue[StepResult | BaseException] = queue.Queue()
        self.begun = [0] * len(self.runners)  # most steps that waited for their Turns at a time
        self.drafted = 0  # plans whose trees were drafted ahead of an earlier plan
        self.threads = [self.ranks.pool.submit(self._work, group) for group in self.ranks.groups]

    def launch(self, plan: Plan) -> Answer:
        for plans in self.plans:
            plans.put(plan)
        return Answer(self)

    def execute(self, plan: Plan) -> StepResult:
        return self.launch(plan).result()

    def close(self) -> None:
        for plans in self.plans:
            plans.put(None)
        for thread in self.threads:
            thread.exception(WAIT_SECONDS)

    def _work(self, group: ThreadGroup) -> None:
        try:
            self.ranks._turn(self._serve, group)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                self.results.put(error)

    def _serve(self, group: ThreadGroup) -> None:
        runner, plans = self.runners[group.number], self.plans[group.number]
        received: deque[Plan | None] = deque()
        while True:
            self.ranks.turn.release()
            try:
                if self.delays is not None:
                    time.sleep(self.delays.random() * MAX_DELAY)
                if not received:
                    received.append(plans.get())
                while runner.drafts_ahead and not plans.empty():
                    received.append(plans.get())
            finally:
                self.ranks.turn.acquire()
            runner.look_ahead([plan for plan in received if plan is not None])
            plan = received.popleft()
            if plan is None:
                return runner.close()
            self.drafted += sum(step > plan.step for step in runner._drafted)
            step = runner.launch(plan)
            self.begun[group.number] = max(self.begun[group.number], len(runner.turns))
            if group.number == self.answering:
                self.results.put(step.result())


class Answer(NamedTuple):
    """What a plan will be answered by. Answers come in the order of the plans."""

    ranks: WorkingRanks

    def result(self) -> StepResult:
        found = self.ranks.results.get(timeout=WAIT_SECONDS)
        if isinstance(found, BaseException):
            raise found
        return found


def paths(result: StepResult) -> Any:
    """What all stages know of a result."""
    both = (result.prefill, result.decode)
    return [[(each.tokens, each.nodes, each.folded) for each in part] for part in both]


def comparable(result: StepResult) -> Any:
    """Without what differs from run to run, times and kernels that were compiled, and without the
    scores in traces, which rank 0 alone reports."""
    plain = msgspec.to_builtins(result)
    for name in ("seconds", "decode_seconds", "idle_seconds", "num_compiled", *COPIES):
        plain.pop(name, None)
    for decoded in plain.get("decode", []):
        if decoded.get("trace"):
            decoded["trace"][2] = None
    return plain
