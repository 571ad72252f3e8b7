"""Which kernels a GPU can use: Triton's, and FlashInfer's where it is installed.

``numba_math.usable`` says the same for a CPU. Where neither can be used, callers take the torch
path.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
_TENSOR_CORES = (8, 0)  # compute capability from which bfloat16 is multiplied on them
_DEPENDENT_LAUNCH = (9, 0)


@cache  # asked in every step
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def _is_capable(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TENSOR_CORES


@cache
def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel may be started before the previous one has ended, and wait on the device
    (programmatic dependent launch). Kernels call ``triton_math.previous_done`` before they read."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH


def usable(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether the Triton kernels take tensors of these dtypes on this device."""
    known = all(dtype in _TRITON_DTYPES for dtype in dtypes)
    return known and _is_capable(device) and _is_installed("triton")


def flashinfer_usable(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether FlashInfer is installed and takes tensors of these dtypes on this device.

    It compiles each kernel on first use, once per machine; prefill attention takes minutes.
    """
    known = all(dtype in _FLASHINFER_DTYPES for dtype in dtypes)
    return known and _is_capable(device) and _is_installed("flashinfer")
