"""A method's sums beside those of the group's own collective, on random numbers: repeated and timed
as a decode step does it, in a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from mamba_eagle.parallel.groups import Group, Site
from mamba_eagle.parallel.sum_table import FusedSum, Normed, SumMethod

CALLS = 4  # per repeat: kernels may take turns with buffers
TIMED_CALLS = 20
ROUNDS, REPEATS = 5, 10  # medians of rounds of this many repeats
EPS = 1e-5

# (stream, added, weight, eps) -> their norm: what follows a sum that is not fused
AddNorm: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Normed]
Record: TypeAlias = Callable[[Callable[[], None]], "Captured"]


class Captured:
    """Work that can be repeated: a CUDA graph on the current device. All ranks repeat the same
    works in the same order."""

    def __init__(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            work()  # compiles kernels
            stream.synchronize()
            # the watchdogs of other ranks' communicators use the device meanwhile
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                self.graph.capture_end()

    def repeat(self) -> None:
        self.graph.replay()

    def seconds(self) -> float:
        """Of one repeat; the median of several rounds."""
        took = []
        for _ in range(ROUNDS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.repeat()  # ranks meet
            began.record()
            for _ in range(REPEATS):
                self.repeat()
            ended.record()
            ended.synchronize()
            took.append(began.elapsed_time(ended) / 1e3 / REPEATS)
        return statistics.median(took)

    def forget(self) -> None:
        """Before the ranks leave each other: a communicator waits for graphs that use it."""
        self.graph.reset()


class Numbers(NamedTuple):
    """What one call gets, refilled in place: a captured call reads it."""

    part: Tensor  # [n, size], different on each rank
    stream: Tensor  # [n, size], equal on all ranks
    weight: Tensor  # [size], equal on all ranks

    @classmethod
    def room(cls, site: Site, n: int) -> Numbers:
        like = torch.empty(0, dtype=site.dtype, device=site.group.device)
        size = site.size
        return cls(like.new_empty(n, size), like.new_empty(n, size), like.new_empty(size))

    def refill(self, rank: int, seed: int) -> None:
        for place, x in enumerate(self):
            owner = rank if x is self.part else 0
            generator = torch.Generator(x.device).manual_seed(seed * 1000 + owner * 10 + place)
            x.copy_(torch.randn(x.shape, generator=generator, device=x.device))


class Trial:
    """Calls of a method for n tokens, recorded, with other numbers whenever it is repeated."""

    def __init__(self, site: Site, method: SumMethod, n: int, add_norm: AddNorm, record: Record):
        self.site, self.method, self.add_norm = site, method, add_norm
        self.numbers = [Numbers.room(site, n) for _ in range(CALLS)]
        self.made: list[tuple[Tensor, Normed | None]] = []
        self.seed = n
        self.refill()
        self.recorded = record(self._call)

    def _call(self) -> None:
        self.made = []
        for part, stream, weight in self.numbers:
            whole, normed = self.method.sum(part.clone()), None
            if isinstance(self.method, FusedSum):
                normed = self.method.sum_norm(stream.clone(), part.clone(), weight, EPS)
            self.made.append((whole, normed))

    def refill(self) -> None:
        """With numbers that no call has seen."""
        self.seed += 1
        for call, numbers in enumerate(self.numbers):
            numbers.refill(self.site.group.rank, self.seed * CALLS + call)

    def problem(self) -> str:
        """What is wrong with the results of the last repeat; "" if nothing is. The same on all
        ranks, or "" on some."""
        found = [self._problem(numbers, *made) for numbers, made in zip(self.numbers, self.made)]
        return next(filter(None, found), "")

    def _problem(self, numbers: Numbers, whole: Tensor, normed: Normed | None) -> str:
        group, eps = self.site.group, torch.finfo(self.site.dtype).eps
        expected = group.sum(numbers.part.clone())
        # each addition rounds by eps / 2 of what it adds up
        bound = group.size * eps * group.sum(numbers.part.abs().float())
        wrong = [_differs("the sum", whole, expected, bound)]
        compared = [whole]
        if normed is not None:
            right = self.add_norm(numbers.stream.clone(), expected, numbers.weight, EPS)
            bound = bound + group.size * eps * numbers.stream.abs().float()
            # a norm of random numbers divides them by a number near the root of ranks + 1
            scale = numbers.weight.abs().float()
            near = 2 * scale * bound + 4 * eps * right.normed.abs().float()
            wrong.append(_differs("the stream", normed.stream, right.stream, bound))
            wrong.append(_differs("the norm", normed.normed, right.normed, near))
            compared += normed
        for x in compared:
            bits = x.contiguous().view(torch.uint8)
            every = group.gather(bits)
            if not torch.equal(every, every[:1].expand_as(every)):
                wrong.append("ranks have different bits")
        return next(filter(None, wrong), "")

    def forget(self) -> None:
        self.recorded.forget()
        self.made = []


def _differs(what: str, found: Tensor, expected: Tensor, bound: Tensor) -> str:
    error = (found.float() - expected.float()).abs()
    wrong = ~(error <= bound)  # also where anything is NaN
    if not bool(wrong.any()):
        return ""
    return f"{what} differs from the collective's in {int(wrong.sum())} of {wrong.numel()} places"


class Bench:
    """Repeats calls, and says how many seconds each takes."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def sum(self, site: Site, method: SumMethod | Group, n: int) -> float:
        """Of a sum of n tokens; each adds up what the one before has made."""
        x = Numbers.room(site, n).part.zero_()

        def work() -> None:
            y = x
            for _ in range(TIMED_CALLS):
                y = method.sum(y)

        return self._timed(work)

    def fused(self, site: Site, method: FusedSum, n: int) -> float:
        """Of a sum with the norm."""
        return self._norm(site, method.sum_norm, n)

    def apart(self, site: Site, method: SumMethod | Group, add_norm: AddNorm, n: int) -> float:
        """Of a sum and then the norm."""
        return self._norm(site, lambda stream, x, *_: add_norm(stream, method.sum(x), *_), n)

    def _norm(self, site: Site, norm: AddNorm, n: int) -> float:
        part, stream, weight = (x.zero_() for x in Numbers.room(site, n))

        def work() -> None:
            made = Normed(part, stream)
            for _ in range(TIMED_CALLS):
                made = norm(made.stream, made.normed, weight, EPS)

        return self._timed(work)

    def _timed(self, work: Callable[[], None]) -> float:
        recorded = self.record(work)
        try:
            return recorded.seconds() / TIMED_CALLS
        finally:
            recorded.forget()
