"""Kernels on GPUs whose shared memory holds fewer iterations than Hopper's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from mamba_eagle.kernels.staged import Staged

HELD = 99  # by a multiprocessor


class Kernel:
    """Takes some memory, and more for each stage but one."""

    def __init__(self, base: int = 10, name: str = "shared memory") -> None:
        self.base, self.name = base, name
        self.launched: list[tuple[int, int]] = []  # rows and stages

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., str]:
        return self.launch

    def launch(self, x: str, *, ROWS: int, STAGES: int) -> str:
        self.launched.append((ROWS, STAGES))
        needed = self.base + ROWS * (STAGES - 1)
        if needed > HELD:
            raise OutOfResources(needed, HELD, self.name)
        return x


def test_stages_are_as_many_as_fit_and_tried_once() -> None:
    kernel = Kernel()
    staged = Staged(kernel)
    for rows, stages in ((16, 5), (16, 8), (16, 8), (32, 4), (16, 2), (16, 5), (32, 4)):
        assert staged[(1,)]("x", ROWS=rows, STAGES=stages) == "x"
    tried = [(16, 5), (16, 8), (16, 6), (16, 6), (32, 4), (32, 3), (16, 2), (16, 5), (32, 3)]
    assert kernel.launched == tried


@pytest.mark.parametrize("kernel", [Kernel(100), Kernel(name="threads")])
def test_what_fewer_stages_do_not_help_is_raised(kernel: Kernel) -> None:
    with pytest.raises(OutOfResources):
        Staged(kernel)[(1,)]("x", ROWS=50, STAGES=3)
    assert kernel.launched[-1] == (50, 3 if kernel.name == "threads" else 1)
