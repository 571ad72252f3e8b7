"""The C library's heap after loading."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def give_back_freed_memory() -> None:
    """Return what was freed to the operating system, where the C library can (glibc): weights were
    rounded and put in another order, and what that needed lies between what stays."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
