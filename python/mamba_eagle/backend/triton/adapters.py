"""The slots of adapters on a GPU: of all matrices of a product in one, for two launches."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.kernels.adapters.triton import RANKS, WIDTHS, Slots, add_, tiles_of
from mamba_eagle.kernels.float8.torch import Rounded, widened
from mamba_eagle.layers.adapters import AdapterSize, Additions, MatrixSlots


class PartSlots(MatrixSlots):
    """Those of one matrix, as views of the product's."""

    def __init__(self, size: AdapterSize, number: int, adapters: Slots) -> None:
        """number: of the matrix among the product's."""
        super().__init__(size)
        self.down = adapters.down[:, number]
        self.up = adapters.up[:, :, size.first : size.first + size.outputs]
        self.ranks = adapters.ranks[:, number]

    def put(self, slot: int, down: Tensor, up: Tensor) -> None:
        rank = len(down)
        self.down[slot, :rank].copy_(down)
        self.up[slot, :rank].copy_(up.to(self.up.device).t())  # the host would turn it slowly
        self.ranks[slot] = rank


class SegmentedAdditions(Additions):
    """A program multiplies the rows that have its slot, and reads nothing of slots that no row
    has, nor of ranks beyond the adapter's."""

    sizes = (16, 32, 64, 65, 129)  # as choose_config tells them apart

    def __init__(
        self, sizes: Sequence[AdapterSize], dtype: torch.dtype, device: torch.device
    ) -> None:
        slots, highest, inputs, _, _ = sizes[0]
        rank, outputs = -(-highest // RANKS) * RANKS, [size.outputs for size in sizes]
        self.adapters = Slots(
            torch.zeros(slots, len(sizes), rank, inputs, dtype=dtype, device=device),
            torch.zeros(slots, rank, sum(outputs), dtype=dtype, device=device),
            torch.zeros(slots, len(sizes), dtype=torch.int32, device=device),
            [
                torch.tensor(tiles_of(outputs, width), dtype=torch.int32, device=device)
                for width in WIDTHS
            ],
            math.gcd(RANKS, *outputs),
        )
        super().__init__(
            [PartSlots(size, number, self.adapters) for number, size in enumerate(sizes)]
        )

    def __call__(self, y: Tensor, x: Tensor | Rounded, slots: Tensor) -> None:
        if isinstance(x, Tensor):
            add_(y, x, slots, self.adapters, early=True)  # the product was launched after x
        elif not x.group:
            add_(y, x.values, slots, self.adapters, x.scale, early=True)
        else:
            add_(y, widened(x).to(y.dtype), slots, self.adapters)
