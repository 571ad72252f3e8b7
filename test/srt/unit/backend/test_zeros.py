"""Pools whose memory is taken when it is used are zero, aligned and independent of each other."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from mamba_eagle.backend.place import ALIGNMENT, MIN_BYTES, zeros

HOST = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 0, MIN_BYTES // 64])
def test_they_are_zeros_of_a_shape_and_dtype(rows: int, dtype: torch.dtype) -> None:
    one, other = (zeros(rows, 3, 64, dtype=dtype, device=HOST) for _ in range(2))
    assert one.shape == (rows, 3, 64) and one.dtype == dtype and one.is_contiguous()
    assert one.data_ptr() % ALIGNMENT == 0
    one.view(torch.uint8).fill_(255)
    assert not other.view(torch.uint8).any()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted as Linux does")
def test_memory_is_taken_when_it_is_used() -> None:
    size = 256 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = zeros(size, dtype=torch.uint8, device=HOST)
    pool[: size // 64] = 1
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < size // 4
