"""Where the work of reading a body is done, so that no other request waits for it.

Small bodies are read on the event loop: a thread would cost more than the work. Others go to a
thread, and long ones do not stand before shorter ones. Threads share one interpreter, so what they
do is done in pieces (json_body.py), by numpy, or by the Rust tokenizer, which do not keep its lock.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SMALL_BODY = 4096  # bytes; encoding them takes about 2 ms
QUICK_BODY = 2**18  # about 150 ms
CHAT_THREADS = 8  # a template that loops holds one of them until it is stopped
# A thread that wants the interpreter waits this long before it is given up to it. The event loop
# wants it again after each system call, so at Python's 5 ms one step of 16 streams would
# take 100 ms while another thread computes.
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
    """Pools for bodies of some bytes, for those of many, and for chats, whose templates are
    programs."""

    def __init__(self) -> None:
        threads = max(1, (os.cpu_count() or 1) // 4)
        self._quick = ThreadPoolExecutor(threads, "quick-body")
        self._slow = ThreadPoolExecutor(threads, "slow-body")
        self._chats = ThreadPoolExecutor(CHAT_THREADS, "chat-body")

    async def run(self, body: bytes, work: Callable[[], T], is_chat: bool = False) -> T:
        """``work``'s result, which reads the body."""
        pool = self._quick if len(body) <= QUICK_BODY else self._slow
        if len(body) <= QUICK_BODY and is_chat:
            pool = self._chats
        elif len(body) <= SMALL_BODY:
            return work()
        return await asyncio.get_running_loop().run_in_executor(pool, work)
