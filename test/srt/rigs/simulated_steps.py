"""Decode steps with given times and acceptance, for policies that choose their shapes.

Time is added up exactly; no clock is read. Whether the draft for a position is accepted is a hash
of request and position, so all policies have the same drafts accepted.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.scheduler.estimates import RequestDrafts
from mamba_eagle.scheduler.speculation import Choice, Outcome, ShapePolicy


@functools.lru_cache(None)
def chance(*key: object) -> float:
    """The same number in [0, 1) for the same key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


class Machine(NamedTuple):
    """Step times, as multiples of some second."""

    plain: Callable[[int], float]  # of a batch size
    extra: Callable[[int], float]  # what a node or a drafting step adds, in plain steps
    following: float = 0.01  # what a drafter that is told of plain steps adds to them
    taking_in: float = 0.0  # what it takes for a prompt, in plain steps of one request
    catching_up: float = 1.0  # on tokens of many plain steps, in plain steps

    def seconds(self, shape: TreeShape, batch: int, missed: int) -> float:
        plain = self.plain(batch)
        if shape == PLAIN:
            return plain
        size = shape.nodes - 1 + shape.depth
        behind = self.catching_up * min(missed, 20) / 20
        return plain * (1 + self.extra(batch) * size + behind)


# A large model on a GPU: steps read weights. A small one on a CPU: steps are arithmetic.
GPU = Machine(lambda batch: 1 + batch / 100, lambda batch: 0.05 + batch / 500)
CPU = Machine(lambda batch: batch**0.5, lambda batch: 0.12 + batch / 100)


class Experts(NamedTuple):
    """A mixture of experts: a step's time depends on its tokens, which have experts in common."""

    known: tuple[tuple[int, float], ...]  # tokens, seconds; interpolated by the tokens' logarithm
    drafting: float  # seconds of a drafting step
    following: float = 0.005  # as of a Machine
    taking_in: float = 0.0

    def plain(self, batch: int) -> float:
        for (few, least), (many, most) in itertools.pairwise(self.known):
            if batch <= many:
                return least + (most - least) * math.log(batch / few) / math.log(many / few)
        raise ValueError(f"{batch} tokens: no time is known")

    def seconds(self, shape: TreeShape, batch: int, missed: int) -> float:
        catching_up = self.drafting * min(missed, 20) / 20 if shape.depth else 0.0
        return self.plain(batch * shape.nodes) + self.drafting * shape.depth + catching_up


# Nemotron-3-Nano-30B-A3B in bf16 on an H100, experts drawn at random for each token, milliseconds:
# plain steps of 1 to 64 requests, and trees of 8 nodes of 32 and 64 without their drafting
# (benchmark/results/h100.jsonl).
# SAME: all tokens go to the same experts, so what grows is the rest (estimated).
UNIFORM = Experts(((1, 2.87), (8, 8.28), (32, 18.12), (64, 22.29), (256, 24.36), (512, 28.1)), 0.18)
SAME = Experts(((1, 2.8), (8, 3.0), (32, 3.9), (64, 5.6), (256, 10.4), (512, 18.0)), 0.18)


class Noise:
    """Other users of the machine: spells in which it is up to three times slower, and stalls."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slower, self.left = 1.0, 0.0

    def slower_than(self, seconds: float) -> float:
        """What takes so long takes how much longer?"""
        if self.left <= 0:
            busy = self.slower == 1.0
            self.slower = self.random.uniform(1.3, 3.0) if busy else 1.0
            self.left = self.random.expovariate(1 / (60 if busy else 150))
        self.left -= seconds
        stall = 4.0 if self.random.random() < 0.02 else 1.0
        return self.slower * self.random.uniform(0.9, 1.1) * stall


@dataclass
class Run:
    """What came of it. seconds: of an undisturbed machine."""

    seconds: float = 0.0
    tokens: int = 0
    steps: Counter[str] = field(default_factory=Counter)  # by the shape's name
    choices: list[Choice] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Simulation:
    """``batch`` requests at a time, each of ``length`` tokens, the next one when one has ended;
    one step is in flight while the next is chosen. ``rate(request, position)``: how likely the
    best draft of a depth is accepted."""

    def __init__(
        self,
        policy: ShapePolicy,
        machine: Machine | Experts,
        batch: int,
        rate: Callable[[int, int], float],
        length: int = 128,
        noise: Noise | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.machine, self.rate, self.noise = policy, machine, rate, noise
        self.length, self.seed = length, seed
        self.taken_in = 0.0  # seconds
        self.requests = [self._admitted() for _ in range(batch)]
        self.numbers = list(range(batch))
        # they are at different places from the beginning
        self.positions = [i * length // batch for i in range(batch)]
        self.in_flight: deque[tuple[Choice, list[RequestDrafts]]] = deque()
        self.missed = 0

    def run(self, tokens: int) -> Run:
        """Until each place of the batch has made so many tokens, on average."""
        run = Run()
        while run.tokens < tokens * len(self.requests):
            while len(self.in_flight) < 2:
                self._choose()
            self._step(run)
        return run

    def _admitted(self) -> RequestDrafts:
        request = RequestDrafts()
        self.policy.admit(request)
        if request.tracked:
            self.taken_in += self.machine.taking_in * self.machine.plain(1)
        return request

    def _choose(self) -> None:
        in_flight = [each[0] for each in self.in_flight]
        choice = self.policy.choose(self.requests, in_flight)
        for place in choice.untracked:
            self.policy.untrack(self.requests[place])
        self.in_flight.append((choice, list(self.requests)))

    def _step(self, run: Run) -> None:
        choice, requests = self.in_flight.popleft()
        shape, batch = choice.shape, len(requests)
        seconds = self.machine.seconds(shape, batch, self.missed)
        if shape == PLAIN:
            tracked = sum(request.tracked for request in requests) / batch
            seconds *= 1 + self.machine.following * tracked
        self.missed = self.missed + 1 if shape == PLAIN else 0
        outcomes = []
        for place, request in enumerate(requests):
            ended = request is not self.requests[place]  # in the step before
            outcomes.append(Outcome(request, 0 if ended else self._make(place, shape)))
        run.seconds += seconds + self.taken_in
        self.taken_in = 0.0
        run.tokens += sum(outcome.tokens for outcome in outcomes)
        run.steps[shape.name] += 1
        run.choices.append(choice)
        slower = self.noise.slower_than(seconds) if self.noise else 1.0
        self.policy.observe(choice, outcomes, slower * seconds)

    def _make(self, place: int, shape: TreeShape) -> int:
        """Tokens of the request at this place of the batch, which may end."""
        number, position = self.numbers[place], self.positions[place]
        drafts, most = 0, min(shape.depth, shape.nodes - 1)
        lanes = max(1.0, (shape.nodes - 1) / max(shape.depth, 1))
        rate = 1 - (1 - self.rate(number, position)) ** lanes**0.6
        while drafts < most and chance(self.seed, number, position + drafts) < rate * 0.97**drafts:
            drafts += 1
        tokens = min(drafts + 1, self.length - position)
        self.positions[place] += tokens
        if self.positions[place] == self.length:
            self.requests[place] = self._admitted()
            self.numbers[place] += len(self.requests)
            self.positions[place] = 0
        return tokens
