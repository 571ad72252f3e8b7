"""Where the tests of Triton kernels run, and what they share.

On a GPU, or in Triton's interpreter: that must be chosen before triton is imported, so without a
GPU one test of each file runs its file again in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Cuda, Host

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
runs_kernels = pytest.mark.skipif(
    not (GPU or INTERPRETED), reason="no CUDA device; test_in_the_interpreter runs it"
)
needs_interpreter = pytest.mark.skipif(GPU or INTERPRETED, reason="the other tests run here")
# relative error of numbers rounded to bfloat16, where the interpreter cuts
BFLOAT16_ERROR = 3e-3 if GPU else 5e-3

Tensors = TypeVar("Tensors", bound=tuple)


def run_in_the_interpreter(path: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def triton_backend(dtype: torch.dtype = torch.float32) -> Backend:
    """A GPU's; without one on a CPU, where the interpreter runs its kernels."""
    from mamba_eagle.backend.triton.backend import TritonBackend  # needs triton

    place = Cuda(DEVICE) if GPU else Host()
    return TritonBackend(place, dtype, flashinfer=False)


def to_device(parts: Tensors) -> Tensors:
    """A NamedTuple with its tensors moved."""
    moved = (part.to(DEVICE) if isinstance(part, Tensor) else part for part in parts)
    return type(parts)(*moved)


def random_rates(heads: int, generator: torch.Generator) -> Tensor:
    """A of heads that forget in 1 to 7 units of dt."""
    return -torch.exp(torch.rand(heads, generator=generator) * 4 - 2)
