"""Launches that find their kernel by a key of their own: it must differ wherever Triton's does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from launch_keys import Keys, NoDevice
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mamba_eagle.backend.triton import launches


@triton.jit(do_not_specialize=["n"])
def _any(x, y, n, size, factor, KIND: tl.constexpr, WIDTH: tl.constexpr = 8):
    tl.store(x, n + size)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", NoDevice())
    monkeypatch.setattr(launches, "_forms", {})


def test_a_key_differs_wherever_tritons_does() -> None:
    """Any two of these calls, which differ in type, value, alignment, dtype or an option."""
    room = torch.zeros(64)
    pointers = [room, room[1:], room[4:], room.bfloat16(), torch.nn.Parameter(room), None]
    numbers = [1, 2, 16, 17, 0, -1, -16, 2**31 - 1, 2**31, 2**40, 2**63, True, False, None, 1.0]
    plain = (room, room, 3, 3, 0.5, "a")
    keys = Keys()
    for at, values in ((0, pointers), (1, pointers), (2, numbers), (3, numbers), (4, numbers)):
        for value in values:
            keys.see(_any, (*plain[:at], value, *plain[at + 1 :]), {"num_warps": 4})
    for kind, warps, width in itertools.product(("a", 1, True, None, tl.int32), (4, 8), (8, 16)):
        keys.see(_any, plain[:5], {"KIND": kind, "WIDTH": width, "num_warps": warps})
    assert keys.tritons_per_key == 1 and len(keys.seen) > 50


def test_values_that_need_the_same_kernel_have_few_keys() -> None:
    """Lengths differ from pass to pass: those that are not specialised on have one key."""
    x, keys = torch.zeros(8), Keys()
    for n in range(2, 500):
        keys.see(_any, (x, x, n, 16 * n, n / 3, None), {})
    assert len(keys.seen) == 1


def test_what_is_unknown_is_left_to_triton() -> None:
    keys = Keys()
    for value in ((torch.zeros(1), 3), [1], torch.Size([1])):
        assert keys.key(_any, (torch.zeros(1), value, 1, 1, 1.0, 1), {}) is None
    assert keys.key(_any, (torch.zeros(1),), {}) is None  # one that Triton refuses


class Launch(NamedTuple):
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    stream: int


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[Launch] = []

    def run(self, x: int, y: int, z: int, stream: int, *others: Any) -> None:
        own, bound = others[:5], others[5:]
        assert own == ("function", "metadata", None, None, None)
        self.launched.append(Launch((x, y, z), bound, stream))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, stream: self.launched.append(Launch(grid[:3], args, stream))


@pytest.mark.parametrize("direct", [True, False])
def test_the_first_launch_is_tritons_and_others_give_the_kernel_the_same(
    monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    monkeypatch.setattr(launches, "DIRECT", direct)
    compiled: list[Compiled] = []

    def tritons(self: Any, *args: Any, **options: Any) -> Compiled:
        compiled.append(Compiled())
        return compiled[-1]

    monkeypatch.setattr(launches, "triton_run", tritons)
    monkeypatch.setattr(JITFunction, "run", launches.run)
    x, y = torch.zeros(8), torch.ones(8)
    for n in (5, 6, 7):
        _any[(n,)](y, x, n, size=3, factor=0.5, KIND="a", num_warps=4)
    _any[lambda bound: (bound["n"], bound["WIDTH"])](
        x, y, 9, size=5, factor=1.5, KIND="a", num_warps=4
    )
    assert len(compiled) == 1, "each kind is compiled once"
    assert [each.grid for each in compiled[0].launched] == [(6, 1, 1), (7, 1, 1), (9, 8, 1)]
    last = compiled[0].launched[-1]
    assert last.arguments[0] is x and last.arguments[1] is y and last.stream == 0
    assert last.arguments[2:] == (9, 5, 1.5, "a", 8)
    _any[(1,)](x, y, 5, size=3, factor=0.5, KIND="b", num_warps=4)
    assert len(compiled) == 2
    _any.warmup(x, y, 5, 3, 0.5, "a", grid=(1,))
    assert len(compiled) == 3, "nothing is launched that shall not be"
