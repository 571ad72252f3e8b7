"""What a program consists of: calls of kernels, and the memory that they hand on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.compile_progress import PROGRESS
from mamba_eagle.cpu.abi import CallRow
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.team import Program


class Scratch:
    """Memory that a program's calls hand on, by name; it grows with a step's sizes."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}  # bytes per row
        self.spare: dict[str, int] = {}  # rows beside those of a step
        self.blocks: dict[str, Tensor] = {}
        self.rows = 0

    def want(self, name: str, bytes_per_row: int, spare: int = 0) -> None:
        """The largest of those that are wanted under this name. spare: rows beside a step's."""
        self.wanted[name] = max(self.wanted.get(name, 0), bytes_per_row)
        self.spare[name] = max(self.spare.get(name, 0), spare)

    def grow(self, rows: int) -> None:
        """New blocks, for ``rows`` rows."""
        self.rows = rows
        self.blocks = {
            name: torch.empty((rows + self.spare[name]) * each + 64, dtype=torch.uint8)
            for name, each in self.wanted.items()
        }

    def at(self, name: str) -> int:
        return -(-self.blocks[name].data_ptr() // 64) * 64


class Call:
    """A kernel and its block, of which some fields are addresses in the scratch, or of what is kept
    here."""

    def __init__(self, kernel: SpanKernel, block: Any, **columns: int) -> None:
        """columns: those of ``CallRow``."""
        self.kernel, self.block = kernel, block
        self.row = CallRow(arguments=block.address, **columns)
        self.scratch: list[tuple[Any, str, str, int]] = []
        self.kept: list[Any] = []

    def lies(self, block: Any = None, before: int = 0, **fields: str) -> None:
        """Fields are addresses in the scratch: by field the name there. block: one within that of
        the call; before: bytes in front of it per row."""
        block = self.block if block is None else block
        self.scratch += [(block, field, name, before) for field, name in fields.items()]

    def place(self, scratch: Scratch) -> None:
        for block, field, name, before in self.scratch:
            setattr(block, field, scratch.at(name) + before * scratch.rows)

    def keep(self, **arrays: np.ndarray) -> None:
        """Fields are the addresses of arrays, which stay."""
        self.kept += arrays.values()
        self.block.point(**arrays)


def program_of(name: str, calls: Sequence[Call]) -> Program:
    """Its kernels are compiled, or loaded from Numba's cache. name: for the log."""
    kernels = list(dict.fromkeys(call.kernel for call in calls))
    for number, kernel in enumerate(kernels, 1):
        PROGRESS.what = f"{name}, kernel {number} of {len(kernels)}"
        kernel.prepare()
    PROGRESS.what = "kernels"
    for call in calls:
        call.row.function = call.kernel.address
    return Program([call.row for call in calls])
