"""How sums over ranks are made for how many tokens: found out at the start, by all ranks alike.

A method of ours is used only where it could be made on every rank, gave the sums of the group's own
collective on random numbers in captured calls, with equal bits on all ranks, and was faster.
Docs: docs/design/parallel.md.
"""

import logging
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from mamba_eagle.parallel.groups import Site
from mamba_eagle.parallel.sum_table import FusedSum, SumMethod, SumTable
from mamba_eagle.parallel.sums.shared_memory import JoinedSum, ends_within
from mamba_eagle.parallel.sums.trial import AddNorm, Bench, Trial

log = logging.getLogger("mamba_eagle.parallel")

GAIN = 0.97  # a method replaces the collective where it takes less than this part of its time
MIXED_ROUNDS = 3
MAX_SECONDS = 120.0  # for a step of this that takes a few


def sizes_up_to(tokens: int) -> list[int]:
    """Numbers of tokens that are tried: powers of two, and the largest."""
    return sorted({*(1 << bit for bit in range(tokens.bit_length())), tokens})


class Choice(NamedTuple):
    """What a method is compared with, and by what."""

    site: Site
    add_norm: AddNorm
    bench: Bench
    or_collective: bool  # it stays where it is faster; else it is for what the method cannot

    def agreed(self, name: str, problem: str) -> bool:
        """Whether no rank has a problem."""
        if self.site.group.smallest([not problem])[0]:
            return True
        why = problem or "another rank cannot use it, see its log"
        log.warning("sums are not added up by %s: %.300s", name, why)
        return False

    # ── what works ──

    def joined(self, kind: type[JoinedSum]) -> SumMethod | None:
        """None if it cannot be made on every rank. First each rank looks for itself: one that
        failed while they join would leave the others waiting."""
        if not self.agreed(kind.name, attempt(lambda: kind.why_not(self.site))):
            return None
        made: list[SumMethod] = []
        with ends_within(MAX_SECONDS, f"preparations of sums by {kind.name}"):
            problem = attempt(lambda: made.append(kind.join(self.site)))
            return made[0] if self.agreed(kind.name, problem) else None

    def works(self, method: SumMethod) -> bool:
        """Whether it gives the collective's sums: for each number of tokens, and then with captured
        calls for all of them in any order, as in steps."""
        trials: list[Trial] = []
        try:
            with ends_within(MAX_SECONDS, f"trials of sums by {method.name}"):
                return self._each_works(method, trials) and self._mixed_work(method, trials)
        finally:
            for trial in trials:
                trial.forget()

    def _each_works(self, method: SumMethod, trials: list[Trial]) -> bool:
        for n in sizes_up_to(self.site.tokens):
            problem = attempt(lambda: self._tried(method, n, trials))  # noqa: B023
            if not self.agreed(f"{method.name} ({n} tokens)", problem):
                return False
        return True

    def _tried(self, method: SumMethod, n: int, trials: list[Trial]) -> str:
        trial = Trial(self.site, method, n, self.add_norm, self.bench.record)
        trials.append(trial)
        found = []
        for _ in range(2):  # all ranks do both, whatever one of them finds
            trial.refill()
            trial.recorded.repeat()
            found.append(trial.problem())
        return next(filter(None, found), "")

    def _mixed_work(self, method: SumMethod, trials: list[Trial]) -> bool:
        order = random.Random(0)  # the same on all ranks
        for _ in range(MIXED_ROUNDS):
            order.shuffle(trials)
            for trial in trials:
                trial.refill()
            for trial in trials:
                trial.recorded.repeat()
            for trial in trials:
                if not self.agreed(f"{method.name} (in any order)", trial.problem()):
                    return False
        return True

    # ── what is faster ──

    def table(self, method: SumMethod) -> SumTable:
        """By what each takes here and now; rank 0 decides for all."""
        site, bench = self.site, self.bench
        collective = site.group  # which has no table yet, and adds up by NCCL or gloo
        sums: dict[int, SumMethod | None] = {}
        norms: dict[int, FusedSum | None] = {}
        for n in sizes_up_to(site.tokens):
            plain = self._agreed_seconds(bench.sum(site, each, n) for each in (collective, method))
            # where the collective is not wanted, it need not be slower
            sums[n] = method if self._is_faster(plain, not self.or_collective) else None
            # a norm after the faster sum, or one with its sum
            seconds = [bench.apart(site, sums[n] or collective, self.add_norm, n)]
            if isinstance(method, FusedSum):
                seconds.append(bench.fused(site, method, n))
            normed = self._agreed_seconds(seconds)
            is_fused = self._is_faster(normed)
            norms[n] = method if is_fused and isinstance(method, FusedSum) else None
            names = ("collective", method.name), ("apart", method.name)
            shown = [_shown(*pair) for pair in zip(names, (plain, normed))]
            log.info("%d tokens: sum %s; with norm %s", n, *shown)
        return SumTable(site.size, site.dtype, sums, norms)

    def _agreed_seconds(self, own: Iterable[float]) -> list[float]:
        """Of the slowest rank."""
        seconds = torch.tensor(list(own), dtype=torch.float32, device=self.site.group.device)
        return self.site.group.max(seconds).tolist()

    def _is_faster(self, seconds: list[float], in_any_case: bool = False) -> bool:
        """Whether the second one, if there is one, gains enough; or is taken in any case."""
        gains = in_any_case or (len(seconds) > 1 and seconds[1] < GAIN * seconds[0])
        decided = torch.tensor([int(gains)], device=self.site.group.device)
        return bool(self.site.group.from_first(decided).item())


def choose_sums(
    site: Site,
    kind: type[JoinedSum],
    add_norm: AddNorm,
    bench: Bench,
    *,
    or_collective: bool = True,
) -> SumTable:
    """To be called by all ranks of ``site`` together, before it has a table; it waits for the
    device. kind: the method to try. or_collective: see ``Choice``."""
    choice = Choice(site, add_norm, bench, or_collective)
    method = choice.joined(kind)
    if method is None or not choice.works(method):
        return SumTable()
    with ends_within(MAX_SECONDS, "sums that are timed"):
        return choice.table(method)


def attempt(work: Callable[[], object]) -> str:
    """What ``work`` returns if that is a text, or else the error that it raised; "" if neither."""
    try:
        made = work()
    except Exception as error:  # whatever an optional package raises
        return f"{type(error).__name__}: {error}"
    return made if isinstance(made, str) else ""


def _shown(names: Iterable[str], seconds: Iterable[float]) -> str:
    return ", ".join(f"{name} {each * 1e6:.1f} us" for name, each in zip(names, seconds))
