"""The slots of adapters of one matrix on a CPU, in float32."""

import torch
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.spans.adapters import ADD
from mamba_eagle.layers.adapters import AdapterSize, Addition

PRODUCTS_PER_NS = 8  # multiply-adds


class CpuAddition(Addition):
    """``down`` lies with its ranks side by side, as the kernel adds them up, and what a slot holds
    at its beginning: of lines that are far apart the memory gives what lies between, too."""

    def __init__(self, size: AdapterSize) -> None:
        super().__init__(size)
        ADD.prepare()  # no request waits for it
        slots, rank, inputs, outputs, first = size
        self.down = torch.zeros(slots, inputs, rank)
        self.up = torch.zeros(slots, rank, outputs)
        self.ranks = torch.zeros(slots, dtype=torch.int64)
        self.row_slots = abi.RowSlots()  # of passes without a program
        self.block = abi.Addition(
            row_slots=self.row_slots.address, R=rank, S=slots, inputs=inputs, outputs=outputs,
            first=first,
        )  # fmt: skip
        self.block.point(down=self.down, up=self.up, ranks=self.ranks)

    @property
    def work_per_row(self) -> int:
        """Nanoseconds."""
        size = self.size
        return size.rank * (size.inputs + size.outputs) // PRODUCTS_PER_NS

    def put(self, slot: int, down: Tensor, up: Tensor) -> None:
        rank = len(down)
        self.down[slot].view(-1)[: down.numel()].copy_(down.t().flatten())
        self.up[slot, :rank].copy_(up.t())
        self.ranks[slot] = rank

    def __call__(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        assert y.is_contiguous() and slots.dtype == torch.int64
        x, n = x.contiguous(), len(x)
        small = torch.empty(n, self.size.rank)
        self.row_slots.point(slots=slots)
        self.block.point(x=x, y=y, small=small)
        self.block.assign(rows=n, width=y.shape[1])
        ADD(n, n * self.work_per_row, self.block)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes
