"""Operations between matrix products by Triton, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton_rig import DEVICE, needs_interpreter, run_in_the_interpreter, runs_kernels

from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.layers.ops import TORCH


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@runs_kernels
@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_a_squared_relu_is_torchs(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(DEVICE)
    wanted = TORCH.relu_squared(x)
    assert torch.equal(TritonOps().relu_squared(x), wanted)


@runs_kernels
@pytest.mark.parametrize("heads, dim, turned", [(1, 16, 16), (3, 24, 16), (5, 8, 6)])
def test_queries_and_keys_turn_as_by_torch(heads: int, dim: int, turned: int) -> None:
    """In a fused product, whose other heads stay; channels past ``turned`` stay, too."""
    generator = torch.Generator().manual_seed(heads)
    packed = torch.randn(7, heads + 2, dim, generator=generator).to(DEVICE)
    angles = (torch.rand(7, 1, turned // 2, generator=generator) * 100).to(DEVICE)
    before = packed.clone()
    found = TritonOps().rotate(packed[:, 1:-1], angles.cos(), angles.sin())
    wanted = TORCH.rotate(before[:, 1:-1], angles.cos(), angles.sin())
    torch.testing.assert_close(found, wanted)
    assert torch.equal(packed[:, 0], before[:, 0]) and torch.equal(packed[:, -1], before[:, -1])
