"""Noise keyed by (seed, position, token id), in each form against naive.py.

That the hash is the published one, and the noise uniform, independent and Gumbel, is tested in
unit/runner/test_sampler.py.

Triton's interpreter runs this file beside test_sampling.py.
"""

from __future__ import annotations

import pytest
import torch
from forms import TORCH, TRITON, device_of
from torch import Tensor

from mamba_eagle.kernels.sampling_noise import naive
from mamba_eagle.kernels.sampling_noise import torch as noise_torch

SEEDS, POSITIONS = (0, 2**63 - 1, 1234567), (0, 131_071, 1)
LOWEST = -1.0  # below it float32 rounds 1 - u, of which noise is made, too coarsely to compare
forms = pytest.mark.parametrize("form", [TORCH, TRITON])


def made(form: str, what: str, vocab_size: int) -> Tensor:
    """[3, V], a row for each seed and its position."""
    module = noise_torch
    if form == "triton":
        from mamba_eagle.kernels.sampling_noise import triton as module  # type: ignore[no-redef]
    keys = (torch.tensor(part).to(device_of(form)) for part in (SEEDS, POSITIONS))
    return getattr(module, what)(*keys, vocab_size).cpu()


@pytest.mark.parametrize("form", [TORCH])
@pytest.mark.parametrize("vocab_size", [1, 5, 1500])
def test_bits_are_those_of_the_hash(form: str, vocab_size: int) -> None:
    bits = made(form, "hash_bits", vocab_size)
    assert bits.dtype == torch.int64
    for row, seed, position in zip(bits.tolist(), SEEDS, POSITIONS, strict=True):
        assert row == [naive.hash_bits(seed, position, token) for token in range(vocab_size)]


@forms
def test_noise_is_gumbels(form: str) -> None:
    noise = made(form, "gumbel", 1500)
    assert noise.dtype == torch.float32
    exact = torch.tensor(
        [
            [naive.gumbel(seed, position, token) for token in range(1500)]
            for seed, position in zip(SEEDS, POSITIONS)
        ],
        dtype=torch.float64,
    )
    decides = exact > LOWEST
    assert 0.9 < decides.double().mean() < 0.99
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(noise[decides].double(), exact[decides], **close)
    torch.testing.assert_close(noise.double(), exact, rtol=0, atol=1e-3)
