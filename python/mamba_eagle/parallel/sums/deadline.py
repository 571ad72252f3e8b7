"""An end to what hangs: a kernel that waits for another rank's for ever cannot be given up."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger("mamba_eagle.parallel")


@contextlib.contextmanager
def ends_within(
    seconds: float,
    what: str,
    leave: Callable[[int], object] = os._exit,
    remedy: str = "--all-reduce nccl",
) -> Iterator[None]:
    """Ends the process if ``what`` takes longer; the other ranks then end, too. leave: how."""

    def give_up() -> None:
        log.critical(
            "%s have not come to an end within %g s, since ranks wait for each other; start with "
            "%s",
            what,
            seconds,
            remedy,
        )
        leave(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
