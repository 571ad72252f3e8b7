"""Contestants that take turns, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar


@dataclass(frozen=True)
class Round:
    """What a contestant made in one round."""

    tokens: int
    seconds: float
    steps: int = 0  # decode steps, counted once per request; 0: not counted

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        """Tokens per request and step."""
        return self.tokens / self.steps if self.steps else 1.0


Player = TypeVar("Player")
SomeRound = TypeVar("SomeRound", bound=Round)


@dataclass
class Contestant(Generic[Player, SomeRound]):
    """One that plays: an engine, a server; and its rounds so far."""

    name: str
    player: Player
    rounds: list[SomeRound] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second, one per round."""
        return [each.tokens_per_second for each in self.rounds]

    @property
    def median_speed(self) -> float:
        return median(self.speeds)

    @property
    def fastest(self) -> float:
        return max(self.speeds)

    def ratios(self, other: Contestant[Player, SomeRound]) -> list[float]:
        """Speeds divided by the other's of the same round."""
        return [own / base for own, base in zip(self.speeds, other.speeds, strict=True)]


def play_rounds(
    contestants: Sequence[Contestant[Player, SomeRound]],
    play: Callable[[Player], SomeRound],
    rounds: int,
    max_seconds: float | None = None,
) -> None:
    """Each plays ``rounds`` rounds, in turn; another one begins each. Earlier rounds are dropped:
    they were the warm-up, or answered another question.

    max_seconds: no round begins that would end later, if it took as long as those before.
    """
    for contestant in contestants:
        contestant.rounds.clear()
    begin = time.perf_counter()
    for number in range(rounds):
        spent = time.perf_counter() - begin
        if number and max_seconds is not None and spent * (number + 1) / number > max_seconds:
            break
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            contestant.rounds.append(play(contestant.player))
