"""The C library's heap: what loading took is given back, what passes take is kept."""

import ctypes
import sys
from contextlib import suppress

import torch

# mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes
_KEPT, _MAPPED = (-1, 128 << 20), (-3, 32 << 20)


def give_back_freed_memory() -> None:
    """Return what was freed to the operating system, where the C library can (glibc): weights were
    rounded and put in another order, and what that needed lies between what stays. On a GPU also
    what torch keeps for later: pools are as large as the memory that is free.

    What passes free from now on stays for the next pass. Mapping it again each time took 6 % of a
    prompt pass of the embedded model, 512 tokens on a CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.malloc_trim(0)
            for option in (_KEPT, _MAPPED):
                library.mallopt(*option)
