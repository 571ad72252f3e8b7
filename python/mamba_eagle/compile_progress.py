"""What the log says of the minute in which a first start compiles the kernels of a CPU."""

import logging
import time
from typing import Any

import numba
from numba.core import event

log = logging.getLogger("mamba_eagle")


class Progress(event.Listener):
    """Says in the log what a start compiles, every few seconds; nothing if the cache has it all."""

    SECONDS = 5.0  # between lines

    def __init__(self) -> None:
        self.what = "kernels"
        self._serving = 0  # runners, which say themselves what is compiled
        self._began: float | None = None
        self._said = 0.0

    def begin_serving(self) -> None:
        """A start is over."""
        self._serving += 1
        if self._began is not None:
            log.info("compiled in %.0f s", time.monotonic() - self._began)
        self._began = None

    def end_serving(self) -> None:
        self._serving -= 1

    def on_start(self, _: Any) -> None:
        now = time.monotonic()
        if self._serving:
            return
        if self._began is None:
            self._began = self._said = now
            log.info(
                "compiling kernels for this processor, for a minute or two; %s keeps them for "
                "later starts",
                numba.config.CACHE_DIR,  # type: ignore[attr-defined]
            )
        elif now - self._said >= self.SECONDS:
            self._said = now
            log.info("compiling %s, %.0f s so far", self.what, now - self._began)

    def on_end(self, _: Any) -> None: ...


PROGRESS = Progress()
event.register("numba:compile", PROGRESS)
