"""How ranks exchange tensors: the interface, and the group of a single rank.

All ranks execute the same plans, so they call the same operations in the same order. Results have
equal bits on all ranks; whatever steers later work (drafted and sampled tokens, parents, sizes) is
such a result, never computed by each rank for itself. tests: test/srt/rigs/thread_ranks.py runs
ranks as threads; distributed.py has gloo and NCCL.
"""

import contextlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mamba_eagle.parallel.shard import Shard
from mamba_eagle.parallel.sum_table import COLLECTIVES, FusedSum, SumTable


class Channel(IntEnum):
    """What pipeline stages tell each other. Messages of a kind arrive in the order of the plans;
    those of different kinds may pass each other."""

    HIDDEN = 1  # from each stage to the next
    TREES = 2  # from the last stage to all
    TOKENS = 3  # the same; first tokens of prompts before the target's tokens


class Mail(Protocol):
    """Carries messages between stages that work at the same time; x is contiguous."""

    def send(self, x: Tensor, rank: int, channel: Channel) -> None: ...

    def receive(self, x: Tensor, rank: int, channel: Channel) -> None: ...


class Window:
    """What a captured step takes from the stage before, and hands on: it is exchanged before and
    after the graph."""

    def __init__(self) -> None:
        self._room: Tensor | None = None  # as large as the largest; not of the graphs' memory
        self.arrives: Tensor | None = None
        self.leaves: Tensor | None = None

    def take(self, like: Tensor) -> Tensor:
        if self._room is None or self._room.numel() < like.numel():
            self._room = torch.zeros_like(like).flatten()
        self.arrives = self._room[: like.numel()].view_as(like)
        return self.arrives


def sum_in_order(parts: Tensor) -> Tensor:
    """What each rank's part adds up to, one after the other, whatever their size: [ranks, ...] ->
    [...] float32, rounded nowhere else. A collective's order may depend on the size."""
    whole = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        whole = whole + part
    return whole


class Group:
    """Ranks that have parts of the same layers, or the pipeline stages. Tensors have the same shape
    and dtype on all ranks and are contiguous; an operation may overwrite the one it is given.

    This class is the group of a single rank, which exchanges nothing. One of several overrides what
    begins with an underscore."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard, self.device = shard, device
        self._quiet = shard.size == 1
        self._window: Window | None = None
        self.in_order = False  # sums of floats are added up in the order of the ranks: --exact
        self.mail: Mail | None = None  # without it, stages on GPUs take turns
        self.sums: SumTable = COLLECTIVES  # of what sums have the shape and dtype of its methods

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def size(self) -> int:
        return self.shard.size

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within, this rank exchanges nothing: each operation takes its own tensor for all ranks'.
        For rehearsals, whose results no one reads."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @contextlib.contextmanager
    def through(self, window: Window) -> Iterator[None]:
        """Within, ``take`` and ``hand_on`` exchange nothing, and the window says what they
        would."""
        before, self._window = self._window, window
        try:
            yield
        finally:
            self._window = before

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the same order of addition on all of them."""
        if self._quiet:
            return x
        method = self.sums.of(x)
        if method is not None:
            return method.sum(x)
        if self.in_order and x.is_floating_point():
            return sum_in_order(self._gather(x)).to(x.dtype)
        return self._sum(x)

    def fused_sum(self, x: Tensor) -> FusedSum | None:
        """What adds x up, adds the sum to a residual stream and takes the norm at once; None:
        nothing that would be faster than ``sum`` and a norm."""
        return None if self._quiet else self.sums.fused(x)

    def max(self, x: Tensor) -> Tensor:
        """The largest of each entry over ranks."""
        return x if self._quiet else self._max(x)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors: x [...] -> [ranks, ...]."""
        return torch.stack([x] * self.size) if self._quiet else self._gather(x)

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's tensor."""
        return x if self._quiet else self._from_first(x)

    def from_last(self, x: Tensor, channel: Channel) -> Tensor:
        """The last rank's tensor. On the last rank this may return before the others have it; x
        must not change afterwards."""
        return x if self._quiet else self._from_last(x, channel)

    def hand_on(self, x: Tensor) -> None:
        """To the next rank, which must ``take`` it; the last rank has none. This may return before
        the other has it; x must not change afterwards."""
        if self._window is not None:
            self._window.leaves = x
        elif not self._quiet:
            self._hand_on(x)

    def take(self, room: Tensor) -> Tensor:
        """What the previous rank hands on. room: of its shape and dtype; may be overwritten."""
        if self._window is not None:
            return self._window.take(room)
        return room.zero_() if self._quiet else self._take(room)

    def collect(self, x: Tensor) -> list[Tensor] | None:
        """All ranks' tensors, on rank 0; None elsewhere."""
        return [x] if self._quiet else self._collect(x)

    def hand_out(self, parts: list[Tensor] | None, room: Tensor) -> Tensor:
        """This rank's of the tensors that rank 0 has for each, elsewhere None. room: of the shape
        and dtype of all of them; may be overwritten."""
        if self._quiet:
            return room if parts is None else parts[0]
        return self._hand_out(parts, room)

    def _exchange(self, *_: Any, **__: Any) -> Any:
        """With other ranks, as the method of this name without the underscore."""
        raise AssertionError("a single rank is always quiet")

    _sum = _max = _gather = _from_first = _from_last = _hand_on = _take = _exchange
    _collect = _hand_out = _exchange

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over ranks; waits for the device."""
        negative = torch.tensor([-number for number in numbers], device=self.device)
        return [-number for number in self.max(negative).tolist()]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sum of each number over ranks; waits for the device."""
        return self.sum(torch.tensor(list(numbers), device=self.device)).tolist()

    def close(self) -> None:
        """Leave the others; nothing may follow."""


ALONE = Group(Shard(), torch.device("cpu"))


class Site(NamedTuple):
    """Where sums are needed: tensors [n, size] of a dtype on the ranks of ``group``, for n up to
    ``tokens``."""

    group: Group
    tokens: int
    size: int
    dtype: torch.dtype
