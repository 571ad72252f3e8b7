"""What gluon_rig lacks for Hopper's kernels: barriers, copies of tiles, products of warp groups.

Partitions of warps are threads. A copy is done at once, and a product when its wait returns, so
that what is overwritten too early shows in the result. A wait that nothing ends raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from gluon_rig import ASYNC, DTYPES, GLUON, HOPPER, LANGUAGE, LAYOUT, Block, Shared, value_of
from torch import Tensor

PATIENCE = 20.0  # seconds until a wait is taken for one that never ends
_changed = threading.Condition()
_of_thread = threading.local()


class _Barrier:
    """``phases`` have ended; a wait for a parity is over if the last of them had it."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.bytes, self.phases = count, 0, 0, 0

    def change(self, arrived: int, missing: int) -> None:
        with _changed:
            self.arrived, self.bytes = self.arrived + arrived, self.bytes + missing
            assert self.arrived <= self.count
            if self.arrived == self.count and not self.bytes:
                self.arrived, self.phases = 0, self.phases + 1
            _changed.notify_all()

    def wait(self, parity: int) -> None:
        with _changed:
            if not _changed.wait_for(lambda: (self.phases - 1) % 2 == parity, PATIENCE):
                raise TimeoutError("a barrier's phase does not end")


_barriers: dict[int, _Barrier] = {}  # by address


def _barrier(at: Shared) -> _Barrier:
    return _barriers[at.memory.data_ptr()]


def _init(at: Shared, count: int) -> None:
    _barriers[at.memory.data_ptr()] = _Barrier(count)


def _expect(at: Shared, size: int, pred: Any = True) -> None:
    if pred:
        _barrier(at).change(1, size)


def _wait_for(at: Shared, parity: Any, pred: Any = True) -> None:
    if pred:
        _barrier(at).wait(int(value_of(parity)))


class TensorDescriptor:
    """A matrix in memory, read in tiles: zeros outside."""

    def __init__(
        self,
        base: Tensor,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        layout: Any,
    ) -> None:
        self.matrix = base.as_strided(shape, strides)
        size = block_shape[0] * block_shape[1] * base.itemsize
        self.block_type = SimpleNamespace(shape=block_shape, nbytes=size)
        self.dtype, self.layout = DTYPES[base.dtype], layout

    def tile(self, row: int, column: int) -> Tensor:
        rows, columns = self.block_type.shape
        part = self.matrix[row : row + rows, column : column + columns]
        missing = (0, columns - part.shape[1], 0, rows - part.shape[0])
        return torch.nn.functional.pad(part, missing)


def _copy(
    source: TensorDescriptor, at: Sequence[Any], barrier: Shared, target: Shared, pred: Any = True
) -> None:
    if pred:
        target.memory.copy_(source.tile(*(int(value_of(i)) for i in at)))
        _barrier(barrier).change(0, -source.block_type.nbytes)


class _Product(Block):
    """Has no value before it is waited for."""

    def __init__(self, a: Block | Shared, b: Shared, acc: Block, use_acc: bool) -> None:
        self.factors, self.acc, self.use_acc = (a, b), acc, use_acc

    def finish(self) -> None:
        a, b = (x.memory if isinstance(x, Shared) else x.value for x in self.factors)
        self.value = a.float() @ b.float()
        if self.use_acc:
            self.value += self.acc.value


def _product(a: Any, b: Shared, acc: Block, use_acc: bool = True, is_async: bool = False) -> Block:
    assert is_async
    found = _Product(a, b, acc, use_acc)
    _of_thread.pending = [*getattr(_of_thread, "pending", []), found]
    return found


def _wait(left: int, deps: list[Block]) -> Any:
    while len(_of_thread.pending) > left:
        _of_thread.pending.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)


def _partitions(parts: list[tuple[Callable[..., None], Any]], warps: Any, registers: Any) -> None:
    raised: list[BaseException] = []

    def run(function: Callable[..., None], args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


vars(LANGUAGE).update(
    float8e4nv=LANGUAGE.float8_e4m3fn,
    DistributedLinearLayout=lambda *_: LAYOUT,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: LAYOUT),
    warp_specialize=_partitions,
    num_warps=lambda: None,
    max=lambda block, axis: Block(block.value.amax(axis)),
)
LAYOUT.parent = LAYOUT
# of a warp group's threads
ASYNC.mbarrier_arrive = lambda at, increment_count: _barrier(at).change(128, 0)


def _module(name: str, **contents: Any) -> None:
    HOPPER[f"{GLUON}.{name}"] = module = ModuleType(f"{GLUON}.{name}")
    vars(module).update(contents)


_module(
    "language.nvidia.hopper",
    fence_async_shared=lambda: None,
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: LAYOUT,
        init=_init,
        expect=_expect,
        arrive=lambda at: _barrier(at).change(1, 0),
        wait=_wait_for,
    ),
    tma=SimpleNamespace(async_load=_copy),
    warpgroup_mma=_product,
    warpgroup_mma_wait=_wait,
)
_module("nvidia")
_module("nvidia.hopper", TensorDescriptor=TensorDescriptor)
