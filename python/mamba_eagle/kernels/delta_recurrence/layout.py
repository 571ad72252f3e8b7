"""What the kernels of gated DeltaNet's recurrence take, and how they divide a head."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.tree_verify.layout import Sizes


def choose_tiles(head_dim: int) -> Tiles:
    """32 of a head's values: then a single prompt of 32 heads has a program for each of an H100's
    multiprocessors. A walk takes a token's time, however few numbers a program has."""
    return Tiles(min(32, head_dim & -head_dim), 0, 4)


def sizes_fit(head_dim: int, state_size: int) -> bool:
    """Whether the kernels take heads of ``head_dim`` values, keys of ``state_size`` numbers."""
    return head_dim % 16 == 0 and state_size in (16, 32, 64, 128)


def check_sizes(sizes: Sizes, state: Tensor) -> None:
    """Raises: ValueError for sizes and states that the kernels do not take."""
    if not sizes_fit(sizes.head_dim, sizes.state_size):
        raise ValueError(
            f"{sizes.head_dim} values per head, keys of {sizes.state_size}: heads must be a "
            "multiple of 16, and keys 16, 32, 64 or 128"
        )
    if state.dtype != torch.float32:
        raise ValueError(f"a state in {state.dtype}: exact bits need float32")
