"""A process of the server must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(check_seconds: float = 1.0) -> None:
    """From now on this process is killed when its parent ends, however that ends.

    On Linux the kernel does it, at once: strictly, when the parent's *thread* that started this
    process ends, so start it from a thread that lives as long as the parent. Elsewhere, and if
    the parent was gone before this call, a thread that looks each ``check_seconds`` does it.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(check_seconds)
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
