"""Where the work of reading a body is done, so that nobody else waits for it.

Small bodies are read on the event loop: a thread would cost more than the work. Others go to a
thread, and long ones do not stand before shorter ones. Threads share one interpreter, so what they
do is done in pieces (json_body.py), by numpy, or by the Rust tokenizer, which do not keep its lock.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SMALL_BODY = 4096  # bytes; encoding them takes about 2 ms
QUICK_BODY = 2**18  # about 150 ms
# A thread that wants the interpreter waits this long before it is given up to it. The event loop
# wants it again after each system call, so with Python's 5 ms a step of 16 streams would take
# 100 ms while another thread computes.
SWITCH_SECONDS = 0.0002

T = TypeVar("T")


def share_interpreter() -> None:
    """Prepares this process for threads beside the event loop; call it when all is loaded."""
    sys.setswitchinterval(SWITCH_SECONDS)
    # One body is not to take the model's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A full collection stops all threads, and what was loaded so far is never garbage.
    gc.collect()
    gc.freeze()


class BodyThreads:
    """Two pools, for bodies of some and of many bytes."""

    def __init__(self) -> None:
        threads = max(1, (os.cpu_count() or 1) // 4)
        self._quick = ThreadPoolExecutor(threads, "quick-body")
        self._slow = ThreadPoolExecutor(threads, "slow-body")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work``'s result; size: bytes of the body that it reads."""
        if size <= SMALL_BODY:
            return work()
        pool = self._quick if size <= QUICK_BODY else self._slow
        return await asyncio.get_running_loop().run_in_executor(pool, work)
