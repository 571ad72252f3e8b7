"""Counts kernels that are compiled, or loaded from a compiler's cache, from some moment on.

Either stops the step that needs the kernel: by seconds, or by milliseconds. A server that is ready
should do neither (docs/design/gpu-steps.md).
"""

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

log = logging.getLogger("mamba_eagle.runner")


class _TritonListener:
    """Triton has room for one: it tells all that listen, and who listened before."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self.before = before
        self.live: WeakSet[Compilations] = WeakSet()

    def __call__(self, *, src: Any, cache_hit: bool, **others: Any) -> None:
        for each in list(self.live):
            each.compiled(src.name, "loaded" if cache_hit else "compiled")
        if self.before is not None:
            self.before(src=src, cache_hit=cache_hit, **others)


class Compilations:
    """Listens from its construction on to the compilers that this process has imported."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._stop: list[Callable[[], object]] = []
        if "triton" in sys.modules:
            self._listen_to_triton()
        if "numba" in sys.modules:
            self._listen_to_numba()

    @property
    def count(self) -> int:
        return len(self.names)

    def close(self) -> None:
        """Listen no more."""
        while self._stop:
            self._stop.pop()()

    def compiled(self, name: str, what: str) -> None:
        """A compiler has begun, or its cache was read."""
        self.names.append(name)
        log.warning("kernel %s was %s while serving: requests waited for it", name, what)

    def _listen_to_triton(self) -> None:
        from triton import knobs

        listener = knobs.compilation.listener
        if not isinstance(listener, _TritonListener):
            knobs.compilation.listener = listener = _TritonListener(listener)
        listener.live.add(self)
        self._stop.append(lambda: listener.live.discard(self))

    def _listen_to_numba(self) -> None:
        from numba.core import event

        from mamba_eagle.compile_progress import PROGRESS

        PROGRESS.begin_serving()
        self._stop.append(PROGRESS.end_serving)
        compiled = self.compiled

        class Listener(event.Listener):
            def on_start(self, event: Any) -> None:
                compiled(str(event.data["dispatcher"].py_func.__name__), "compiled")

            def on_end(self, event: Any) -> None: ...

        own = Listener()
        event.register("numba:compile", own)
        self._stop.append(lambda: event.unregister("numba:compile", own))
