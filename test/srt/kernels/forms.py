"""The forms that an operation has beside its naive.py, and where the tests of each run.

torch's and the CPU engine's run everywhere, Triton's on a GPU or in
Triton's interpreter. The interpreter must be asked for before triton is imported. So without a GPU
one test of each file, ``test_in_the_interpreter``, runs the file again in a process of its own
(interpreter.py), in which the other forms are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import interpreter
import pytest
import torch
from tensor_checks import host_backend, torch_backend

from mamba_eagle.backend.base import Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")  # of the Triton kernels
HAS_TRITON = find_spec("triton") is not None

runs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (GPU or INTERPRETED)),
    reason="no CUDA device; test_in_the_interpreter runs it",
)
_elsewhere = pytest.mark.skipif(INTERPRETED, reason="this process runs Triton's kernels only")

TORCH = pytest.param("torch", marks=_elsewhere)
CPU = pytest.param("cpu", marks=[_elsewhere])
TRITON = pytest.param("triton", marks=runs_kernels)
every_form = pytest.mark.parametrize("form", [TORCH, CPU, TRITON])


def all_in_the_interpreter(*neighbours: str) -> Callable[[pytest.FixtureRequest], None]:
    """As below, for several files at once: a process may take longer to start than their tests."""

    @pytest.mark.skipif(GPU or INTERPRETED or not HAS_TRITON, reason="the other tests run here")
    def test(request: pytest.FixtureRequest) -> None:
        interpreter.check(request.node)

    test.neighbours = neighbours  # type: ignore[attr-defined]
    return test


# For files to collect as ``test_in_the_interpreter``.
in_the_interpreter = all_in_the_interpreter()


def device_of(form: str) -> torch.device:
    """Where the inputs of a form have to be."""
    return DEVICE if form == "triton" else torch.device("cpu")


def backend_of(form: str, dtype: torch.dtype = torch.float32) -> Backend:
    """The backend that uses a form. cpu: what a CPU takes, so torch's where numba does not fit."""
    if form == "triton":
        from triton_rig import triton_backend  # needs triton

        return triton_backend(dtype)
    return torch_backend() if form == "torch" else host_backend(dtype)
