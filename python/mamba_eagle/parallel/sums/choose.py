"""Which way of adding up is taken for how many tokens: found out at the start, by all ranks alike.

A method is used only where it could be made on every rank, gave the sums of the group's own
collective on random numbers in captured calls, with equal bits on all ranks, and was the fastest.
Docs: docs/design/parallel.md.
"""

import logging
import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.sum_table import FusedSum, SumMethod, SumTable
from mamba_eagle.parallel.sums.deadline import ends_within
from mamba_eagle.parallel.sums.site import JoinedSum, Site
from mamba_eagle.parallel.sums.trial import AddNorm, Bench, Trial

log = logging.getLogger("mamba_eagle.parallel")

GAIN = 0.97  # another method replaces the collective where it takes less than this part of its time
MIXED_ROUNDS = 3
MAX_SECONDS = 120.0  # for a step of this that takes a few


class Collective(SumMethod):
    """The group's own: NCCL, or gloo."""

    name = "collective"

    def __init__(self, group: Group) -> None:
        """group: one that has no table yet."""
        self.group = group

    def sum(self, x: Tensor) -> Tensor:
        return self.group.sum(x)


def sizes_up_to(tokens: int) -> list[int]:
    """Numbers of tokens that are tried: powers of two, and the largest."""
    return sorted({*(1 << bit for bit in range(tokens.bit_length())), tokens})


class Choice:
    """The methods that are left, and what they took."""

    def __init__(
        self,
        site: Site,
        kinds: Sequence[type[JoinedSum]],
        add_norm: AddNorm,
        bench: Bench,
        *,
        or_collective: bool = True,
    ) -> None:
        """kinds: the methods to try. or_collective: whether the collective stays where it is the
        fastest; else it is for what no other method can."""
        self.site, self.add_norm, self.bench = site, add_norm, bench
        self.or_collective = or_collective
        self.sizes = sizes_up_to(site.tokens)
        self.trials: dict[SumMethod, list[Trial]] = {}
        for kind in kinds:
            method = self._joined(kind)
            if method is not None:
                self.trials[method] = []

    # ── what works ──

    def _agreed(self, name: str, problem: str) -> bool:
        """Whether no rank has a problem."""
        if self.site.group.smallest([not problem])[0]:
            return True
        why = problem or "another rank cannot use it, see its log"
        log.warning("sums are not added up by %s: %.300s", name, why)
        return False

    def _joined(self, kind: type[JoinedSum]) -> SumMethod | None:
        """None if it cannot be made on every rank. First each rank looks for itself: one that
        failed while they join would leave the others waiting."""
        if not self._agreed(kind.name, attempt(lambda: kind.why_not(self.site))):
            return None
        made: list[SumMethod] = []
        with ends_within(MAX_SECONDS, f"preparations of sums by {kind.name}"):
            problem = attempt(lambda: made.append(kind.join(self.site)))
            return made[0] if self._agreed(kind.name, problem) else None

    def test(self) -> None:
        """Drop the methods that do not give the collective's sums: for each number of tokens, and
        then with captured calls for all of them in any order, as in steps."""
        for method, trials in list(self.trials.items()):
            with ends_within(MAX_SECONDS, f"trials of sums by {method.name}"):
                self._try_all(method, trials)
        with ends_within(MAX_SECONDS, "trials of sums in any order"):
            self._test_mixed()

    def _try_all(self, method: SumMethod, trials: list[Trial]) -> None:
        for n in self.sizes:
            problem = attempt(lambda: self._tried(method, n, trials))  # noqa: B023
            if not self._agreed(f"{method.name} ({n} tokens)", problem):
                return self._drop(method)

    def _test_mixed(self) -> None:
        mixed = [trial for trials in self.trials.values() for trial in trials]
        order = random.Random(0)  # the same on all ranks
        for _ in range(MIXED_ROUNDS):
            order.shuffle(mixed)
            for trial in mixed:
                trial.refill()
            for trial in mixed:
                trial.recorded.repeat()
            for trial in list(mixed):
                problem = trial.problem() if trial.method in self.trials else ""
                if not self._agreed(f"{trial.method.name} (in any order)", problem):
                    self._drop(trial.method)
            mixed = [trial for trial in mixed if trial.method in self.trials]
        for trial in mixed:
            trial.forget()

    def _tried(self, method: SumMethod, n: int, trials: list[Trial]) -> str:
        trial = Trial(self.site, method, n, self.add_norm, self.bench.record)
        trials.append(trial)
        found = []
        for _ in range(2):  # all ranks do both, whatever one of them finds
            trial.refill()
            trial.recorded.repeat()
            found.append(trial.problem())
        return next(filter(None, found), "")

    def _drop(self, method: SumMethod) -> None:
        for trial in self.trials.pop(method):
            trial.forget()

    # ── what is fastest ──

    def table(self) -> SumTable:
        """By what each takes here and now; rank 0 decides for all."""
        site = self.site
        sums: dict[int, SumMethod | None] = {}
        norms: dict[int, FusedSum | None] = {}
        methods: list[SumMethod] = [Collective(site.group), *self.trials]
        fused = [method for method in methods if isinstance(method, FusedSum)]
        for n in self.sizes:
            plain = self._agreed_seconds(self.bench.sum(site, method, n) for method in methods)
            place = self._fastest(plain, self.or_collective)
            sums[n] = methods[place] if place else None
            # a norm after the fastest sum, or one with its sum
            apart = self.bench.apart(site, methods[place], self.add_norm, n)
            joint = [self.bench.fused(site, method, n) for method in fused]
            normed = self._agreed_seconds([apart, *joint])
            place = self._fastest(normed)
            norms[n] = fused[place - 1] if place else None
            log.info(
                "%d tokens: sum %s; with norm %s",
                n,
                _shown([method.name for method in methods], plain),
                _shown(["apart", *(method.name for method in fused)], normed),
            )
        return SumTable(site.size, site.dtype, sums, norms)

    def _agreed_seconds(self, own: Iterable[float]) -> list[float]:
        """Of the slowest rank."""
        seconds = torch.tensor(list(own), dtype=torch.float32, device=self.site.group.device)
        return self.site.group.max(seconds).tolist()

    def _fastest(self, seconds: Sequence[float], may_be_first: bool = True) -> int:
        """The place of the one to take. ``may_be_first``: the first one, which is there anyway, is
        taken unless another one gains enough; else it is taken only where there is no other."""
        first, *others = seconds
        place = 0
        if others and (not may_be_first or min(others) < GAIN * first):
            place = 1 + others.index(min(others))
        decided = torch.tensor([place], device=self.site.group.device)
        return int(self.site.group.from_first(decided).item())


def choose_sums(
    site: Site,
    kinds: Sequence[type[JoinedSum]],
    add_norm: AddNorm,
    bench: Bench,
    *,
    or_collective: bool = True,
) -> SumTable:
    """To be called by all ranks of ``site`` together, before it has a table; it waits for the
    device. Arguments: see ``Choice``."""
    choice = Choice(site, kinds, add_norm, bench, or_collective=or_collective)
    choice.test()
    if not choice.trials:
        return SumTable()
    with ends_within(MAX_SECONDS, "sums that are timed"):
        return choice.table()


def attempt(work: Callable[[], object]) -> str:
    """What ``work`` returns if that is a text, or else the error that it raised; "" if neither."""
    try:
        made = work()
    except Exception as error:  # whatever an optional package raises
        return f"{type(error).__name__}: {error}"
    return made if isinstance(made, str) else ""


def _shown(names: Sequence[str], seconds: Sequence[float]) -> str:
    return ", ".join(f"{name} {each * 1e6:.1f} us" for name, each in zip(names, seconds))
