"""GGUF's blocks of few bits as grouped matrices, number by number the same.

The layouts are those of ``ggml-common.h``: a block of 32 or 256 neighbouring columns begins with
its scale, float16, and blocks never cross rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mamba_eagle.quantization.grouped import GroupedMatrix


def q8_0(blocks: Tensor) -> GroupedMatrix:
    """blocks [..., out, n, 34]: a scale and 32 int8 numbers."""
    return GroupedMatrix(blocks[..., 2:].view(torch.int8).flatten(-2), halves(blocks[..., :2]))


def q4_0(blocks: Tensor) -> GroupedMatrix:
    """blocks [..., out, n, 18]: a scale and 32 codes, whose number is the code less 8. Byte j has
    columns j and j + 16."""
    return GroupedMatrix(paired(blocks[..., None, 2:]), halves(blocks[..., :2]))


def q4_k(blocks: Tensor) -> GroupedMatrix:
    """blocks [..., out, n, 144]: eight groups of 32 codes; two float16 units, that of the scales
    and that of what is subtracted; for each group six bits of both; byte j of 32 bytes has the
    columns j of two groups. Scales and minimums become float32, which holds the products."""
    units = blocks[..., :4].contiguous().view(torch.float16).float()  # [..., out, n, 2]
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    # the first four groups have bytes of their own, whose upper two bits belong to the last four
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    offsets = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return GroupedMatrix(
        paired(blocks[..., 16:].unflatten(-1, (4, 32))),
        (units[..., :1] * scales).flatten(-2),
        (units[..., 1:] * offsets).neg().flatten(-2),
    )


def halves(raw: Tensor) -> Tensor:
    """[..., out, n, 2 k] uint8 -> [..., out, n k] float16."""
    return raw.contiguous().view(torch.float16).flatten(-2)


def paired(raw: Tensor) -> Tensor:
    """[..., out, n, groups, bytes] -> [..., out, columns / 2]: of each group of bytes the low
    halves come first, then the high ones; in the result neighbours share a byte."""
    codes = torch.cat([raw & 15, raw >> 4], dim=-1).flatten(-3)
    return codes[..., 0::2] | codes[..., 1::2] << 4


# ggml's name -> bytes of a block, and how a row of blocks is read
BLOCKS: dict[str, tuple[int, Callable[[Tensor], GroupedMatrix]]] = {
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_K": (144, q4_k),
}


def grouped(rows: Tensor, dtype: str) -> GroupedMatrix:
    """rows: [..., out, bytes of a row] uint8, as a file has them. dtype: one of BLOCKS."""
    size, read = BLOCKS[dtype]
    return read(rows.unflatten(-1, (-1, size)))
