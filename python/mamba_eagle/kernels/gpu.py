"""What kernels ask of a GPU when they are launched."""

from functools import cache

import torch

TENSOR_CORES = (8, 0)  # compute capability from which bfloat16 is multiplied on them
_DEPENDENT_LAUNCH = (9, 0)
PROCESSORS = 132  # a Hopper GPU's multiprocessors, for which configurations are chosen


@cache  # asked in every step
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) where there is no GPU, as in Triton's interpreter."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


@cache
def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel may be started before the previous one has ended, and wait on the device
    (programmatic dependent launch). Kernels call ``triton_math.previous_done`` before they read."""
    return capability(device) >= _DEPENDENT_LAUNCH


@cache
def overlapping(device: torch.device, early: bool = True) -> dict[str, bool]:
    """The arguments by which a launch asks for that; early: whether it should."""
    overlap = early and launches_overlap(device)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


# Triton's functions of these names serve kernels, too, and take the host 5 µs a call.
def cdiv(a: int, b: int) -> int:
    """How many times b covers a."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest that is n or more, of n >= 1."""
    return 1 << (n - 1).bit_length()
