"""Ways to add up over ranks: what is dropped, what is chosen, and that all ranks do the same."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tensor_checks import torch_backend
from thread_ranks import ThreadGroup, ThreadRanks
from torch import Tensor

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.parallel.groups import Site
from mamba_eagle.parallel.sum_table import FusedSum, Normed, SumMethod, SumTable
from mamba_eagle.parallel.sums import shared_memory
from mamba_eagle.parallel.sums.choose import Choice, choose_sums, sizes_up_to
from mamba_eagle.parallel.sums.one_shot import OrderedSum, PushedSum
from mamba_eagle.parallel.sums.shared_memory import JoinedSum, ends_within
from mamba_eagle.parallel.sums.trial import Bench, Captured
from mamba_eagle.runner.sums import sums_for

SIZE, TOKENS = 16, 12  # tried: 1, 2, 4, 8 and 12 tokens
OPS = LayerOps()
add_norm = OPS.add_rms_norm


class Called(Captured):
    """On a CPU: nothing is captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.repeat = work  # type: ignore[method-assign]

    def repeat(self) -> None: ...

    def seconds(self) -> float:
        began = time.perf_counter()
        self.repeat()
        return time.perf_counter() - began

    def forget(self) -> None: ...


class Gathered(FusedSum, JoinedSum):
    """Right, by other means than the group's own sum. ``took``: seconds by number of tokens, of a
    sum and of one with its norm."""

    name = "gathered"
    took: ClassVar[Callable[[int], tuple[float, float]]] = staticmethod(lambda n: (1.0, 9.0))

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, 0

    @classmethod
    def why_not(cls, site: Site) -> str:
        return ""

    @classmethod
    def join(cls, site: Site) -> JoinedSum:
        return cls(site.group)

    def sum(self, x: Tensor) -> Tensor:
        self.calls += 1
        parts = self.group.gather(x)
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
        return whole

    def sum_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        return add_norm(stream, self.sum(added), weight, eps)


class MissesOne(Gathered):
    name = "misses one"

    def sum(self, x: Tensor) -> Tensor:
        return super().sum(x) if len(x) != 4 else self.group.gather(x)[0]


class OwnPartFirst(Gathered):
    """Right but for the order of additions, in which the ranks differ."""

    name = "own part first"

    def sum(self, x: Tensor) -> Tensor:
        parts = self.group.gather(x)
        whole = x.clone()
        for step in range(1, self.group.size):
            whole = whole + parts[(self.group.rank + step) % self.group.size]
        return whole


class WrongNorm(Gathered):
    name = "wrong norm"

    def sum_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        made = super().sum_norm(stream, added, weight, eps)
        return made._replace(normed=made.normed * 1.1)


class ForgetsOldCalls(Gathered):
    """Wrong only once calls for other numbers of tokens came between."""

    name = "forgets"

    def sum(self, x: Tensor) -> Tensor:
        whole = super().sum(x)
        before, self.before = getattr(self, "before", len(x)), len(x)
        return whole if before <= len(x) else whole * 2


class Missing(Gathered):
    """Cannot be made on the last rank."""

    name = "missing"

    @classmethod
    def why_not(cls, site: Site) -> str:
        return "no such package" if site.group.rank == site.group.size - 1 else ""


class Breaks(Gathered):
    name = "breaks"

    @classmethod
    def join(cls, site: Site) -> JoinedSum:
        raise RuntimeError("no memory to share")


class Scripted(Bench):
    """The collective takes 1.0, every norm apart 0.5 more, and others what they say."""

    def __init__(self, rank: int) -> None:
        super().__init__(Called)
        self.rank = rank

    def sum(self, site: Site, method: SumMethod, n: int) -> float:
        return method.took(n)[0] if isinstance(method, Gathered) else 1.0

    def fused(self, site: Site, method: FusedSum, n: int) -> float:
        return method.took(n)[1]

    def apart(self, site: Site, method: SumMethod, add_norm: Any, n: int) -> float:
        return self.sum(site, method, n) + 0.5


class Undecided(Scripted):
    """Each rank finds another one the fastest."""

    def sum(self, site: Site, method: SumMethod, n: int) -> float:
        return 0.5 if isinstance(method, Gathered) == (self.rank == 0) else 0.6


def chosen(
    ranks: ThreadRanks,
    kind: type[JoinedSum],
    bench: Callable[[int], Bench] = Scripted,
    or_collective: bool = True,
) -> SumTable:
    """The table of rank 0; all ranks have the same."""

    def work(group: ThreadGroup) -> SumTable:
        site = Site(group, TOKENS, SIZE, torch.float32)
        return choose_sums(site, kind, add_norm, bench(group.rank), or_collective=or_collective)

    first, *others = ranks.run(work)
    assert all(other.text == first.text for other in others)
    return first


@pytest.fixture(scope="module")
def two() -> ThreadRanks:
    return ThreadRanks(2)


@pytest.fixture(scope="module")
def three() -> ThreadRanks:
    return ThreadRanks(3)


def faster_up_to(limit: int, with_norm_up_to: int = 0) -> type[Gathered]:
    class Faster(Gathered):
        name = "faster"

        @staticmethod
        def took(n: int) -> tuple[float, float]:
            return 0.5 if n <= limit else 2.0, 0.7 if n <= with_norm_up_to else 3.0

    return Faster


def test_each_number_of_tokens_gets_the_faster(two: ThreadRanks) -> None:
    table = chosen(two, faster_up_to(4, with_norm_up_to=2))
    assert table.text == ("1-2 faster with norm, 4 faster, 8-12 collective, more: collective")
    names = [found and found.name for found in (table.of(torch.zeros(n, SIZE)) for n in (1, 3, 5))]
    assert names == ["faster", "faster", None]
    assert table.fused(torch.zeros(2, SIZE)) and not table.fused(torch.zeros(3, SIZE))


def test_a_small_gain_is_not_worth_leaving_the_collective(two: ThreadRanks) -> None:
    class Little(Gathered):
        took = staticmethod(lambda n: (0.98, 9.0))

    assert chosen(two, Little).text == "1-12 collective, more: collective"
    # where it was asked for by name, it is taken all the same
    assert chosen(two, Little, or_collective=False).text == "1-12 gathered, more: collective"


def test_the_slowest_rank_counts_and_rank_0_decides(
    two: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(two, Gathered, bench=Undecided).text == "1-12 collective, more: collective"
    monkeypatch.setattr(Choice, "_agreed_seconds", lambda self, own: list(own))
    assert chosen(two, Gathered, bench=Undecided).text == "1-12 gathered, more: collective"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (MissesOne, "misses one (4 tokens): the sum differs from the collective's"),
        (WrongNorm, "wrong norm (1 tokens): the norm differs"),
        (OwnPartFirst, "own part first (1 tokens): ranks have different bits"),
        (ForgetsOldCalls, "forgets (in any order): the sum differs"),
        (Missing, "missing: no such package"),
        (Breaks, "breaks: RuntimeError: no memory to share"),
    ],
    ids=lambda value: value.name if isinstance(value, type) else "",
)
def test_what_cannot_be_had_or_is_wrong_is_dropped(
    three: ThreadRanks, caplog: pytest.LogCaptureFixture, kind: type[JoinedSum], why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(three, kind, or_collective=False).text == "collective"
    assert why in caplog.text


def test_what_hangs_ends_the_process_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    left: queue.Queue[int] = queue.Queue()
    with ends_within(0.01, "trials of sums", left.put):
        assert left.get(timeout=60) == 1
    assert "trials of sums have not come to an end within 0.01 s" in caplog.text
    assert "--all-reduce nccl" in caplog.text
    with ends_within(60, "what ends in time", left.put):
        pass
    assert left.empty()


@pytest.mark.parametrize("kind", [PushedSum, OrderedSum])
def test_without_gpus_ours_say_what_they_lack(
    three: ThreadRanks, caplog: pytest.LogCaptureFixture, kind: type[JoinedSum]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(three, kind).text == "collective"
    assert f"sums are not added up by {kind.name}: " in caplog.text


def test_a_cpu_has_gloo_alone(two: ThreadRanks) -> None:
    def table(name: str) -> SumTable:
        config = EngineConfig(all_reduce=name, tp_size=2)  # the device is found out later
        return sums_for(config, two.groups[0], torch_backend(), SIZE)

    assert table("auto").text == table("nccl").text == "collective"
    with pytest.raises(ConfigError, match="--all-reduce symmetric: is for GPUs"):
        table("symmetric")


def test_exact_sums_have_the_order_of_the_ranks_whatever_their_size(three: ThreadRanks) -> None:
    """In float32, rounded once; integers are left to the collective, and so is all without it."""
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 257 rounds to 256

    def work(group: ThreadGroup) -> list[float]:
        group.in_order = True
        own, found = parts[group.rank], []
        for count in (1, 3 * TOKENS):
            found += group.sum(own.repeat(count, SIZE)).unique().tolist()
        found += group.sum(torch.tensor([group.rank])).tolist()
        group.in_order = False
        return found + group.sum(own.clone()).tolist()

    assert three.run(work) == [[258.0, 258.0, 3, 256.0]] * 3


def test_a_group_adds_up_by_its_table(two: ThreadRanks) -> None:
    """Tensors of other shapes and dtypes, rehearsals and larger batches do not."""

    def work(group: ThreadGroup) -> list[int]:
        method, calls = Gathered(group), []
        table = SumTable(SIZE, torch.float32, {4: method}, {2: method, 4: None})
        group.sums = table
        weight, ops = torch.ones(SIZE), OPS.over(group)
        try:
            for x in (
                torch.ones(3, SIZE),
                torch.ones(5, SIZE),
                torch.ones(3, SIZE + 1),
                torch.ones(3, SIZE, dtype=torch.float64),
                torch.ones(4),
                torch.ones(0, SIZE),
            ):
                assert torch.equal(group.sum(x.clone()), x * 2)
                calls.append(method.calls)
            with group.quiet():
                assert torch.equal(group.sum(torch.ones(3, SIZE)), torch.ones(3, SIZE))
                assert group.fused_sum(torch.ones(2, SIZE)) is None
            for n in (2, 3, 5):  # fused, a sum and a norm, the collective and a norm
                stream, part = torch.randn(n, SIZE), torch.ones(n, SIZE)
                right = OPS.add_rms_norm(stream.clone(), part * 2, weight, 1e-5)
                found = ops.total_add_rms_norm(stream.clone(), part.clone(), weight, 1e-5)
                assert torch.equal(found.normed, right.normed)
                assert torch.equal(found.stream, right.stream)
                calls.append(method.calls)
        finally:
            group.sums = SumTable()
        return calls

    assert two.run(work) == [[1, 1, 1, 1, 1, 1, 2, 3, 3]] * 2


def test_the_largest_number_of_tokens_is_tried() -> None:
    assert sizes_up_to(12) == [1, 2, 4, 8, 12]
    assert sizes_up_to(8) == [1, 2, 4, 8]
    assert sizes_up_to(1) == [1]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tp_size": 1}, "with --tp-size 1 there is nothing to add up"),
        ({"tp_size": 2, "device": "cpu"}, "is for GPUs"),
        ({"tp_size": 4, "nnodes": 2}, "spread over several machines"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, Any], why: str) -> None:
    config = EngineConfig(all_reduce="symmetric", **settings)
    assert any(why in problem for problem in config.problems())


def test_the_default_and_what_fits_are_not() -> None:
    for settings in (
        {"tp_size": 2},
        {"tp_size": 2, "device": "cpu"},
        {"all_reduce": "auto"},
        {"all_reduce": "symmetric", "tp_size": 3},
        {"all_reduce": "symmetric", "tp_size": 2, "pp_size": 2, "nnodes": 2},
    ):
        assert not any("--all-reduce" in problem for problem in EngineConfig(**settings).problems())


def test_a_second_meeting_of_ranks_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for ranks of the first one: it keeps them by a name that comes again."""
    first, again, other = (SimpleNamespace(group_name=name) for name in ("1", "1", "2"))
    problem = shared_memory.known_problem
    assert not problem(first)
    monkeypatch.setitem(shared_memory._known, "1", first)
    assert not problem(first) and not problem(other)
    assert "before" in problem(again)
