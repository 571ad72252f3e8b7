"""What adapters add to a product: for each row that has one, ``up (down x)``.

Hu et al. 2021 (arXiv 2106.09685). A *slot* holds one adapter; ``lora/slots.py`` fills them. Which
slot a row reads is said around a pass (``reading``), so a pass without adapters looks at nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, widened

_slots: ContextVar[Tensor | None] = ContextVar("slots", default=None)


@contextmanager
def reading(slots: Tensor | None) -> Iterator[None]:
    """Within, row i of each product reads slot ``slots[i]``; [n] int64, -1: none. None: no row of
    the pass has an adapter."""
    token = _slots.set(slots)
    try:
        yield
    finally:
        _slots.reset(token)


def slots_of_rows() -> Tensor | None:
    """As ``reading`` has it."""
    return _slots.get()


class AdapterSize(NamedTuple):
    """Of the slots of one matrix [out, in]."""

    slots: int
    rank: int  # the highest
    inputs: int
    outputs: int
    first: int  # of the product's outputs, the first that is this matrix's


class MatrixSlots(ABC):
    """The slots of one matrix."""

    down: Tensor  # of all slots, as the kind of slots lays them out
    up: Tensor

    def __init__(self, size: AdapterSize) -> None:
        self.size = size

    @abstractmethod
    def put(self, slot: int, down: Tensor, up: Tensor) -> None:
        """An adapter's matrices for a slot, where they overwrite what was there: down [r, in], up
        [out, r], with the scale in it. r = 0: it adds nothing to this matrix."""

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.down.nbytes + self.up.nbytes


class Additions(ABC):
    """The slots of all matrices that are one product."""

    sizes: tuple[int, ...] = ()  # numbers of tokens that between them need every kernel

    def __init__(self, parts: Sequence[MatrixSlots]) -> None:
        self.parts = parts

    @abstractmethod
    def __call__(self, y: Tensor, x: Tensor | Rounded, slots: Tensor) -> None:
        """Add to y [n, out], which was just made of x [n, in], what each row's slot makes of x.
        Rows without one keep their values."""


class Addition(MatrixSlots):
    """A matrix whose slots are multiplied without others'."""

    @abstractmethod
    def __call__(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """To y [n, ≥ first + out] of x [n, in], as ``Additions`` do."""


class SeparateAdditions(Additions):
    parts: Sequence[Addition]

    def __call__(self, y: Tensor, x: Tensor | Rounded, slots: Tensor) -> None:
        given = widened(x).to(y.dtype) if isinstance(x, Rounded) else x
        for part in self.parts:
            part(y, given, slots)


class StackedAddition(Addition):
    """All slots as two products, of which each row keeps what its own slot makes: the number of
    slots decides the time, not how rows are spread over them. It asks the host nothing."""

    def __init__(self, size: AdapterSize, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size)
        slots, rank, inputs, outputs, self.first = size
        self.down = torch.zeros(slots, rank, inputs, dtype=dtype, device=device)
        self.up = torch.zeros(slots, rank, outputs, dtype=dtype, device=device)
        self.numbers = torch.arange(slots, device=device)

    def put(self, slot: int, down: Tensor, up: Tensor) -> None:
        rank = len(down)
        for kept, given in ((self.down, down), (self.up, up.t())):
            kept[slot, :rank].copy_(given)
            kept[slot, rank:].zero_()

    def __call__(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        small = F.linear(x, self.down.flatten(0, 1)).unflatten(-1, self.down.shape[:2])
        small = small.masked_fill((slots[:, None] != self.numbers)[..., None], 0.0)
        own = y[:, self.first : self.first + self.size.outputs]
        own += small.flatten(1) @ self.up.flatten(0, 1)
