"""Work that may not end, such as a chat template's: stopped once it has had its time."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

POLL_SECONDS = 0.05
# A thread waits for others, too. It is given up after this many times its own time on the clock.
PATIENCE = 20

T = TypeVar("T")


class OutOfTime(Exception):
    """The work was stopped."""


class _Stopped(BaseException):
    """Raised inside the work. No Exception: templates' own handlers must not catch it."""


class _Work(threading.Thread, Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True, name="bounded-work")
        self.function = function
        self.result: list[T] = []
        self.error: Exception | None = None
        self._clock: int | None = None
        self._ending = threading.Lock()  # a thread's number may be another's once it has ended
        self._ended = False

    def run(self) -> None:
        try:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self.result.append(self.function())
        except Exception as error:
            self.error = error
        except _Stopped:
            pass
        with self._ending:
            self._ended = True

    def seconds(self) -> float:
        """Processor time that the thread has had; 0 before it begins and after it ends."""
        try:
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        except OSError:
            return 0.0

    def stop(self) -> None:
        assert self.ident is not None
        with self._ending:
            if not self._ended:
                number, error = ctypes.c_ulong(self.ident), ctypes.py_object(_Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


def run_bounded(function: Callable[[], T], seconds: float) -> T:
    """``function()``, run in a thread of its own for at most so much processor time.

    Whatever it runs as Python can be stopped anywhere, so it must own nothing that others use. A
    single call into C (one huge multiplication of strings, say) ends before it is stopped.

    Raises: OutOfTime; whatever ``function`` raises.
    """
    work = _Work(function)
    given_up = time.monotonic() + PATIENCE * seconds
    work.start()
    while True:
        work.join(min(POLL_SECONDS, seconds))
        if not work.is_alive():
            break
        if work.seconds() >= seconds or time.monotonic() >= given_up:
            work.stop()
            raise OutOfTime
    if work.error is not None:
        raise work.error
    return work.result[0]
