"""What a program consists of: calls of kernels, and the memory that they hand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.kernels.numba_team import call_row
from mamba_eagle.kernels.vector_code import SpanKernel


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
        """New blocks, for so many rows."""
        self.rows = rows
        self.blocks = {
            name: torch.empty((rows + self.spare[name]) * each + 64, dtype=torch.uint8)
            for name, each in self.wanted.items()
        }

    def at(self, name: str) -> int:
        return -(-self.blocks[name].data_ptr() // 64) * 64


class Call:
    """A kernel and its arguments; ``places`` says which of them are addresses in the scratch, that
    of the frame, or addresses of what is kept here."""

    def __init__(self, kernel: SpanKernel, words: Sequence[int], **columns: int) -> None:
        kernel.prepare()
        self.kernel, self.words = kernel, np.array(words, np.int64)
        self.columns = columns
        self.scratch: dict[int, tuple[str, int]] = {}  # place -> name, bytes before it per row
        self.kept: list[Any] = []

    def place(self, scratch: Scratch) -> None:
        for place, (name, before) in self.scratch.items():
            self.words[place] = scratch.at(name) + before * scratch.rows

    def keep(self, place: int, values: np.ndarray) -> None:
        """The address of ``values``, which stays."""
        self.kept.append(values)
        self.words[place] = values.ctypes.data

    def row(self) -> list[int]:
        return call_row(self.kernel.address, self.words.ctypes.data, **self.columns)


def table_of(calls: Sequence[Call]) -> np.ndarray:
    return np.array([call.row() for call in calls], np.int64)
