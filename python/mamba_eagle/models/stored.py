"""A checkpoint's tensors as its files describe them, and as they are read."""

from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


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
