"""Kernels whose loops have several iterations in flight: as many as a GPU's shared memory holds.

Configurations were chosen on Hopper, whose multiprocessors have 227 KiB. Others have 163 (A100) or
99 (most of compute capability 8.6, 8.9 and 12.0).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from triton.runtime.errors import OutOfResources


class Staged:
    """A kernel with STAGES; where memory is short it is launched with fewer, from then on at once.

    Raises: OutOfResources if one is too much.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._fitting: dict[tuple[object, ...], int] = {}  # by all other constants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, self.fn[grid])

    def _launch(self, launch: Callable[..., Any], *args: Any, STAGES: int, **given: Any) -> Any:
        kind = tuple(given.values()) if self._fitting else ()
        stages = min(STAGES, self._fitting.get(kind, STAGES))
        try:
            return launch(*args, STAGES=stages, **given)
        except OutOfResources as error:
            if error.name != "shared memory" or stages == 1:
                raise
            # a loop of n stages holds what n - 1 of them have read
            fitting = 1 + (stages - 1) * error.limit // error.required
            self._fitting[tuple(given.values())] = min(fitting, stages - 1)
        return self._launch(launch, *args, STAGES=STAGES, **given)
