"""Weights as integers in groups, and their codes in the order of products: what loading does.

Numbers are compared as integers, which vectorises: bits of floats rise with their size.
"""

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.machine_code import SIZE, exactly, ordered


@exactly
def _largest(values, group, out):  # noqa: ANN001, ANN202
    """The largest size in each group: values [rows, in] float32 -> out [rows, groups]."""
    bits, found = values.view(np.int32), out.view(np.int32)
    for r in range(found.shape[0]):
        for g in range(found.shape[1]):
            row, largest = bits[r, g * group : (g + 1) * group], np.int32(0)
            for i in range(group):
                largest = max(largest, np.int32(row[i] & SIZE))
            found[r, g] = largest


@exactly
def _range(values, group, lowest, highest):  # noqa: ANN001, ANN202
    """The range of each group: values [rows, in] float32 -> lowest, highest [rows, groups]."""
    bits, low, high = values.view(np.int32), lowest.view(np.int32), highest.view(np.int32)
    for r in range(low.shape[0]):
        for g in range(low.shape[1]):
            row = bits[r, g * group : (g + 1) * group]
            least = most = ordered(row[0])
            for i in range(1, group):
                number = ordered(row[i])
                least, most = min(least, number), max(most, number)
            low[r, g], high[r, g] = ordered(least), ordered(most)


@exactly
def _round(values, group, scale, codes):  # noqa: ANN001, ANN202
    """codes [rows, in] int8 = values / scale, at most 127 in size."""
    top = np.float32(127.0)
    for r in range(scale.shape[0]):
        for g in range(scale.shape[1]):
            row, out = values[r, g * group : (g + 1) * group], codes[r, g * group : (g + 1) * group]
            divisor = scale[r, g] if scale[r, g] != np.float32(0.0) else np.float32(1.0)
            for i in range(group):
                out[i] = np.int32(min(max(np.rint(row[i] / divisor), -top), top))


@exactly
def _round_pairs(values, group, scale, minimum, codes):  # noqa: ANN001, ANN202
    """codes [rows, in / 2] uint8, two of 0 to 15 each = (values - minimum) / scale."""
    zero, top = np.float32(0.0), np.float32(15.0)
    numbers = np.empty(group, np.uint8)
    for r in range(scale.shape[0]):
        for g in range(scale.shape[1]):
            row, lowest = values[r, g * group : (g + 1) * group], minimum[r, g]
            out = codes[r, g * group // 2 : (g + 1) * group // 2]
            divisor = scale[r, g] if scale[r, g] != zero else np.float32(1.0)
            for i in range(group):
                number = np.rint((row[i] - lowest) / divisor)
                numbers[i] = np.int32(min(max(number, zero), top))
            for i in range(group // 2):
                out[i] = numbers[2 * i] | (numbers[2 * i + 1] << 4)


@exactly
def _order_nibbles(words):  # noqa: ANN001, ANN202
    """In place: words of eight codes, in order, become those of a product, in which each byte has
    one of the first four in its low bits, and one of the others."""
    for i in range(words.shape[0]):
        word = words[i]
        # 0x76543210 becomes 0x76325410, then 0x73625140
        moved = (word ^ (word >> np.uint32(8))) & np.uint32(0x0000FF00)
        word = word ^ moved ^ (moved << np.uint32(8))
        moved = (word ^ (word >> np.uint32(4))) & np.uint32(0x00F000F0)
        words[i] = word ^ moved ^ (moved << np.uint32(4))


def largest(values: Tensor, group: int) -> Tensor:
    """[rows, in] float32 -> [rows, in / group], the largest size in each group."""
    out = values.new_empty(len(values), values.shape[1] // group)
    _largest(values.numpy(), group, out.numpy())
    return out


def range_of(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[rows, in] float32 -> smallest and largest number of each group, [rows, in / group]."""
    lowest = values.new_empty(len(values), values.shape[1] // group)
    highest = torch.empty_like(lowest)
    _range(values.numpy(), group, lowest.numpy(), highest.numpy())
    return lowest, highest


def round_to_bytes(values: Tensor, group: int, scale: Tensor, codes: Tensor) -> None:
    """values [rows, in], scale [rows, in / group] float32 -> codes [rows, in] int8."""
    _round(values.numpy(), group, scale.numpy(), codes.numpy())


def round_to_pairs(
    values: Tensor, group: int, scale: Tensor, minimum: Tensor, codes: Tensor
) -> None:
    """The same with minima, as four bits: codes [rows, in / 2] uint8, low bits first."""
    _round_pairs(values.numpy(), group, scale.numpy(), minimum.numpy(), codes.numpy())


def order_nibbles(codes: Tensor) -> Tensor:
    """codes [rows, in / 2] uint8 -> [rows, in / 8] int32, each with eight codes in the order of
    products: byte k has input k in its low bits and 4 + k in its high ones."""
    words = codes.view(torch.int32).clone()
    _order_nibbles(words.flatten().numpy().view(np.uint32))
    return words
