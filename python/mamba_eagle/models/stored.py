"""A checkpoint's tensors as its files describe them, and as they are read."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mamba_eagle.models.base import Target
from mamba_eagle.parallel.cut import Cut


class Stored(NamedTuple):
    """A tensor as described in a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: BF16, I64, …
    nbytes: int
    key: str = ""  # name in the file, where that is another
    begin: int = 0  # of its bytes, in the file

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class Opened(NamedTuple):
    """A tensor of a file, with its name."""

    name: str
    value: Tensor


class Part(NamedTuple):
    """What a rank needs of a checkpoint's tensor, and where that goes in its model."""

    target: Target
    cut: Cut | None  # None: all of it
    packed: bool = False  # a matrix of few bits: cut once it is read, with its scales

    def held_as(self, places: dict[str, str]) -> Part | None:
        """Under the name that its place has in a pipeline stage's model; None if it has none."""
        name = places.get(self.target.name)
        return None if name is None else self._replace(target=replace(self.target, name=name))
