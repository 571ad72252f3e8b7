"""What tests of kernels, models and the runner share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mamba_eagle import devices
from mamba_eagle.backend.base import Backend
from mamba_eagle.devices import choose_backend
from mamba_eagle.runner.chooser import Chooser
from mamba_eagle.runner.constraints import TokenMasks
from mamba_eagle.runner.sampler import Scored
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.tree.tree import Tree


@contextmanager
def torch_path(wanted: bool = True) -> Iterator[None]:
    """Within, no dtype is the CPU engine's."""
    before = devices.CPU_DTYPES
    if wanted:
        devices.CPU_DTYPES = ()
    try:
        yield
    finally:
        devices.CPU_DTYPES = before


def host_backend(dtype: torch.dtype = torch.float32) -> Backend:
    """What a CPU takes here: with Numba's kernels if they fit."""
    return choose_backend(torch.device("cpu"), dtype)


def torch_backend() -> Backend:
    """The reference of all others, in float32 on a CPU."""
    return Backend(host_backend().place, torch.float32)


def sample(
    state: SamplingState,
    slots: list[int],
    logits: Tensor,
    positions: Tensor,
    tree: Tree | None,
    allowed: TokenMasks | None = None,
) -> Tensor:
    """What one rank samples: ``Chooser.sample``."""
    return Chooser(state).sample(Scored(slots, logits, positions, tree), allowed)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of ``expected``, which must have a shape like it."""
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


class Draw:
    """Inputs of the recurrence, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def decay_rates(self, heads: int) -> Tensor:
        """A: [heads], -0.14 to -7.4."""
        return -torch.exp(torch.rand(heads, generator=self.generator) * 4 - 2)

    def steps(self, *shape: int, largest: float) -> Tensor:
        """dt, as softplus leaves it."""
        return torch.rand(*shape, generator=self.generator) * largest

    def below(self, end: int, begin: int = 0) -> int:
        return int(torch.randint(begin, end, (), generator=self.generator))
