"""How the recurrence's kernels divide a head among programs."""

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_verify.layout import Sizes


class Tiles(NamedTuple):
    """A program's channels, all of one head: a tile, and where P is not a power of two another."""

    tile: int  # a power of two, at least 4 per warp
    rest: int  # of the second; 0: none
    warps: int


def choose_tiles(head_dim: int, state_size: int) -> Tiles:
    """The whole head if its state fits into the registers of four warps with at most 80 numbers a
    thread, as for P = 80, N = 128."""
    tile = min(8192 // state_size, 1 << head_dim.bit_length() - 1)
    rest = head_dim - tile
    if rest >= 16 and rest & (rest - 1) == 0 and head_dim * state_size <= 80 * 128:
        return Tiles(tile, rest, 4)
    return Tiles(min(tile, head_dim & -head_dim), 0, 4)


def check_sizes(sizes: Sizes, state: Tensor, largest: int = 256) -> None:
    """Raises: ValueError for sizes and states that the kernels do not take."""
    H, P, G, N = sizes
    if P % 16 or N & (N - 1) or not 16 <= N <= largest:
        raise ValueError(
            f"{P} channels per head, {N} numbers per channel: heads must be a multiple of 16, and "
            f"states 16 to {largest}, a power of two"
        )
    if state.dtype != torch.float32:
        raise ValueError(f"a state in {state.dtype}: exact bits need float32")
