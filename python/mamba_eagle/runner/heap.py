"""Memory that loading took, given back."""

import ctypes
import sys
from contextlib import suppress

import torch


def give_back_freed_memory() -> None:
    """Return what was freed to the operating system, where the C library can (glibc): weights were
    rounded and put in another order, and what that needed lies between what stays. On a GPU also
    what torch keeps for later: pools are as large as the memory that is free."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
