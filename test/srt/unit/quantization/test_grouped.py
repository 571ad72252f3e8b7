"""Matrices of int8 and int4 groups: what they stand for, cut, joined and stacked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mamba_eagle.quantization.four_bit import pack
from mamba_eagle.quantization.grouped import (
    GroupedMatrix,
    int4_groups,
    int8_groups,
)

GROUP = 32


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def by_number(matrix: GroupedMatrix) -> Tensor:
    """The weight [out, in], one number after the other."""
    out = torch.empty(matrix.shape)
    for o in range(matrix.shape[0]):
        for i in range(matrix.shape[1]):
            if matrix.bits == 8:
                code = int(matrix.codes[o, i])
            else:
                byte = int(matrix.codes[o, i // 2])
                code = byte >> 4 if i % 2 else byte & 15
            scale = float(matrix.scale[o, i // matrix.group])
            if matrix.minimum is not None:
                out[o, i] = scale * code + float(matrix.minimum[o, i // matrix.group])
            else:
                out[o, i] = scale * (code if matrix.bits == 8 else code - 8)
    return out


def q4_0(out: int, columns: int) -> GroupedMatrix:
    codes = torch.randint(0, 16, (out, columns), generator=torch.Generator().manual_seed(5))
    scale = weight(out, columns // GROUP).half()
    return GroupedMatrix(pack(codes), scale)


KINDS = {
    "int8": lambda: int8_groups(weight(6, 96)),
    "int4 with minimum": lambda: int4_groups(weight(6, 96)),
    "int4": lambda: q4_0(6, 96),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_its_codes_times_its_scales(kind: str) -> None:
    matrix = KINDS[kind]()
    torch.testing.assert_close(matrix.dequantize(), by_number(matrix), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_matrix_are_parts_of_its_weight(kind: str) -> None:
    matrix = KINDS[kind]()
    whole = matrix.dequantize()
    rows, columns = matrix.narrow(-2, 1, 4), matrix.narrow(-1, 32, 64)
    assert torch.equal(rows.dequantize(), whole[1:5])
    assert torch.equal(columns.dequantize(), whole[:, 32:96])
    parts = [matrix.narrow(-2, 0, 2), matrix.narrow(-2, 2, 4)]
    joined = GroupedMatrix.join(parts)
    assert joined is not None and torch.equal(joined.dequantize(), whole)
    stacked = GroupedMatrix.stack([matrix, matrix])
    assert stacked is not None and torch.equal(stacked.dequantize()[1], whole)
    torch.testing.assert_close(matrix.times(0.3).dequantize(), whole * 0.3)
    with pytest.raises(ValueError, match="cuts a group of 32"):
        matrix.narrow(-1, 16, 32)


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    given = weight(8, 64)
    given[3, 32:] = 0.0
    for matrix in (int8_groups(given), int4_groups(given)):
        step = matrix.scale.float().repeat_interleave(GROUP, -1)
        # scales and minima are rounded to float16, which the largest number of a group feels
        off = (matrix.dequantize() - given).abs()
        assert bool((off <= step * 0.5 + given.abs() * 2**-10).all())
        assert bool((matrix.dequantize()[3, 32:] == 0).all())


def test_what_does_not_fit_is_refused() -> None:
    codes = torch.zeros(4, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scale \[4, 3\] does not fit a weight \[4, 64\]"):
        GroupedMatrix(codes, torch.ones(4, 3))
    with pytest.raises(ValueError, match="codes are torch.int16"):
        GroupedMatrix(codes.to(torch.int16), torch.ones(4, 2))
