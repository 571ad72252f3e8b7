"""Noise keyed by (seed, position, token id): the same text whatever else is served."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.kernels.sampling_noise.torch import gumbel as plain_gumbel


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of (seed, position, token id): both [n] int64 -> [n, V] float32."""
    if seed.is_cuda:
        from mamba_eagle.kernels.sampling_noise import triton

        return triton.gumbel(seed, position, vocab_size)
    return plain_gumbel(seed, position, vocab_size)


__all__ = ["gumbel"]
