"""Runs Gluon kernels on a CPU, program by program, for which Triton has no interpreter.

A module of kernels is imported once more with another ``gluon``, whose tensors are torch's. Layouts
mean nothing here: what a kernel loads, computes and stores is checked, and the order of its sums is
assumed to be that of ``recurrence/naive.py``. What threads do to each other is not seen.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ptx_rig
import torch
from torch import Tensor

from mamba_eagle.kernels.recurrence.naive import fma

PACKAGE = "mamba_eagle.kernels."
GLUON = "triton.experimental.gluon"
TORCH_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int16, torch.int32, torch.int64, torch.bool),
)


def exp2(x: Tensor) -> Tensor:
    """torch's has other bits in vectors than for one number."""
    return x.double().exp2().float()


LAYOUT = SimpleNamespace(warps_per_cta=None)  # of anything
HOPPER: dict[str, Any] = {}  # hopper_rig's modules, if it is imported


class Dtype(SimpleNamespace):
    """Of numbers, and of pointers to them."""

    torch: torch.dtype

    @property
    def element_ty(self) -> Dtype:
        return self

    @property
    def primitive_bitwidth(self) -> int:
        return self.torch.itemsize * 8


DTYPES = {dtype: Dtype(torch=dtype) for dtype in TORCH_DTYPES}


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Block) else x


def _operator(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def apply(self: Block, other: Any) -> Any:
        if isinstance(other, Pointers):
            return NotImplemented
        pair = self.value, value_of(other)
        return Block(function(*(pair[::-1] if swapped else pair)))

    return apply


class Block:
    """A tensor of a program, or one number."""

    type = SimpleNamespace(layout=LAYOUT)

    def __init__(self, value: Any) -> None:
        self.value = torch.as_tensor(value)

    shape = property(lambda self: tuple(self.value.shape))
    dtype = property(lambda self: DTYPES[self.value.dtype])

    def to(self, dtype: Dtype, bitcast: bool = False) -> Block:
        return Block(self.value.view(dtype.torch) if bitcast else self.value.to(dtype.torch))

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.value.reshape(shape))

    def broadcast_to(self, shape: list[int]) -> Block:
        return Block(self.value.broadcast_to(shape))

    def permute(self, order: list[int]) -> Block:
        return Block(self.value.permute(order))

    def __getitem__(self, at: Any) -> Block:
        return Block(self.value[at])

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __neg__(self) -> Block:
        return Block(-self.value)

    def __invert__(self) -> Block:
        return Block(~self.value)

    for _name in "add sub mul truediv floordiv mod and_ or_ lshift rshift".split():
        _own = _operator(getattr(operator, _name))
        locals()[f"__{_name.rstrip('_')}__"] = _own
        locals()[f"__r{_name.rstrip('_')}__"] = _operator(getattr(operator, _name), swapped=True)
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        locals()[f"__{_name}__"] = _operator(getattr(operator, _name))


class Pointers:
    """Into the memory of a tensor."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, torch.as_tensor(offset, dtype=torch.int64)

    dtype = property(lambda self: DTYPES[self.memory.dtype])

    def __add__(self, other: Any) -> Pointers:
        return Pointers(self.memory, self.offset + value_of(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointers:
        return Pointers(self.memory, self.offset - value_of(other))

    def __getitem__(self, at: Any) -> Pointers:
        return Pointers(self.memory, self.offset[at])

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets, 0 where masked; and the mask. Raises: IndexError outside of the memory."""
        allowed = torch.as_tensor(True if mask is None else value_of(mask))
        offset, allowed = torch.broadcast_tensors(self.offset, allowed)
        wrong = allowed & ((offset < 0) | (offset >= self.memory.numel()))
        if wrong.any():
            raise IndexError(f"{offset[wrong][:4].tolist()} of {self.memory.numel()} numbers")
        return torch.where(allowed, offset, 0), allowed


class Shared:
    """Shared memory: what is not written is NaN."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    shape = property(lambda self: tuple(self.memory.shape))
    dtype = property(lambda self: DTYPES[self.memory.dtype])

    def index(self, at: Any) -> Shared:
        at = operator.index(at)
        assert 0 <= at < len(self.memory)
        return Shared(self.memory[at])

    def load(self, layout: Any) -> Block:
        return Block(self.memory.clone())

    def store(self, block: Block) -> None:
        assert self.memory.shape == block.value.shape
        self.memory.copy_(block.value)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.memory[start : start + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def reinterpret(self, dtype: Dtype, shape: Any, layout: Any) -> Shared:
        return Shared(self.memory.view(*shape))


def _load(at: Pointers, mask: Any = None, other: float = 0.0, eviction_policy: str = "") -> Block:
    offset, allowed = at.places(mask)
    memory = at.memory if at.memory.numel() else at.memory.new_zeros(1)  # no load but masked ones
    return Block(torch.where(allowed, memory[offset], torch.tensor(other).to(memory.dtype)))


def _store(at: Pointers, block: Any, mask: Any = None) -> None:
    offset, allowed = at.places(mask)
    value = torch.as_tensor(value_of(block)).to(at.memory.dtype).expand(offset.shape)
    at.memory[offset[allowed]] = value[allowed]


def _copy(target: Shared, at: Pointers, mask: Any = None) -> None:
    target.store(_load(at, mask, float("nan")))


def _room(dtype: Dtype, shape: Any, layout: Any, block: Block | None = None) -> Shared:
    shape = [value_of(size) for size in shape]
    return Shared(torch.full(shape, torch.nan).to(dtype.torch) if block is None else block.value)


def _assembly(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    if pack == 8:
        return _chains(asm, args)
    if constraints == "=h,=h,r":
        assert asm == "mov.b32 {$0, $1}, $2;"
        return tuple(Block((args[0].value >> at).to(torch.int16)) for at in (0, 16))
    found = ptx_rig.run(asm, len(dtype), [arg.value for arg in args])
    return tuple(Block(part.to(own.torch)) for part, own in zip(found, dtype, strict=True))


def _chains(asm: str, args: Any) -> Block:
    assert asm.count("fma.rn.f32") == 7
    a, b = (part.value.unflatten(-1, (-1, 8)) for part in args)
    total = a[..., 0] * b[..., 0]
    for i in range(1, 8):
        total = fma(a[..., i], b[..., i], total)
    return Block(torch.nn.functional.pad(total[..., None], (0, 7)).flatten(-2))


def _sum(block: Block, axis: int) -> Block:
    parts = list(block.value.split(8, axis))
    total = functools.reduce(operator.add, parts)
    while total.shape[axis] > 1:
        total = operator.add(*total.chunk(2, axis))
    return Block(total.squeeze(axis))


def _reduce(block: Block, axis: int, combine: Callable[[Block, Block], Block]) -> Block:
    return functools.reduce(combine, map(Block, block.value.unbind(axis)))


def _product(a: Block, b: Block, total: Block, precision: str = "") -> Block:
    """Of matrices side by side, summed up in float64 and rounded once."""
    return Block((a.value.double() @ b.value.double() + total.value.double()).float())


def _broadcast(a: Block, b: Block) -> tuple[Block, ...]:
    return tuple(map(Block, torch.broadcast_tensors(a.value, b.value)))


def _on_tensors(function: Callable[..., Tensor]) -> Callable[..., Block]:
    return lambda *args: Block(function(*(torch.as_tensor(value_of(arg)) for arg in args)))


class Kernel:
    """A function of a kernel, or a kernel, which can be launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        known = inspect.signature(self.function).parameters

        def launch(*args: Any, **named: Any) -> None:
            given = [
                Pointers(torch.as_strided(arg, (arg.untyped_storage().nbytes() // arg.itemsize
                - arg.storage_offset(),), (1,))) if isinstance(arg, Tensor) else arg
                for arg in args
            ]  # fmt: skip
            options = {name: value for name, value in named.items() if name in known}
            for program in itertools.product(*map(range, grid)):
                LANGUAGE.program_id = lambda axis, at=program: Block(at[axis])
                LANGUAGE.num_programs = lambda axis: grid[axis]
                self.function(*given, **options)

        return launch


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def _nothing(*_: Any, **__: Any) -> None:
    return None


LANGUAGE: Any = ModuleType(f"{GLUON}.language")
vars(LANGUAGE).update(
    {str(dtype).removeprefix("torch."): own for dtype, own in DTYPES.items()},
    constexpr=lambda value: value,
    shared_memory_descriptor=Shared,
    barrier=_nothing,
    static_range=range,
    load=_load,
    store=_store,
    allocate_shared_memory=_room,
    inline_asm_elementwise=_assembly,
    sum=_sum,
    reduce=_reduce,
    broadcast=_broadcast,
    reduce_or=lambda block, axis: _reduce(block, axis, operator.or_),
    join=lambda a, b: Block(torch.stack([a.value, b.value], -1)),
    split=lambda block: tuple(map(Block, block.value.unbind(-1))),
    reshape=Block.reshape,
    permute=Block.permute,
    expand_dims=lambda block, axis: Block(block.value.unsqueeze(axis)),
    constexpr_function=lambda function: function,
    convert_layout=lambda block, layout, assert_trivial=False: block,
    arange=lambda begin, end, layout=None: Block(torch.arange(begin, end, dtype=torch.int32)),
    full=lambda shape, value, dtype, layout=None: Block(
        torch.full(shape, 0, dtype=dtype.torch) + value_of(value)
    ),
    cdiv=lambda a, b: -(-a // b),
    zeros=lambda shape, dtype, layout=None: Block(torch.zeros(shape, dtype=dtype.torch)),
    **dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"), lambda *_: LAYOUT),
    **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout"), lambda *_: LAYOUT),
    **{
        name: _on_tensors(getattr(torch, name)) for name in ("minimum", "maximum", "rsqrt", "where")
    },
    exp2=_on_tensors(lambda x: exp2(x)),
    fma=_on_tensors(fma),
)
ASYNC = SimpleNamespace(async_load=_copy, commit_group=_nothing, wait_group=_nothing)


def _modules() -> dict[str, Any]:
    """In place of Gluon's."""
    names = ("triton.experimental", GLUON, f"{GLUON}.language", f"{GLUON}.language.nvidia")
    experimental, gluon, _, nvidia = (ModuleType(name) for name in names)
    ampere: Any = ModuleType(f"{names[-1]}.ampere")
    vars(ampere).update(async_copy=ASYNC, mma_v2=_product)
    vars(gluon).update(jit=_jit, constexpr_function=lambda function: function, language=LANGUAGE)
    vars(experimental)["gluon"] = gluon
    made = dict(zip(names, (experimental, gluon, LANGUAGE, nvidia)))
    return {**made, ampere.__name__: ampere, **HOPPER}


def _range(*bounds: Any) -> Iterator[Block]:
    return map(Block, range(*map(operator.index, bounds)))


def _is_gluon(name: str) -> bool:
    return name.startswith(PACKAGE) and ".gluon" in name


@functools.cache
def interpreted(*names: str) -> list[Any]:
    """Modules of kernels/, as ``recurrence.gluon_fold``, whose launches run here."""
    replaced = _modules()
    real = {name: m for name, m in sys.modules.items() if name in replaced or _is_gluon(name)}
    for name in real:
        del sys.modules[name]
    sys.modules.update(replaced)
    try:
        found = [importlib.import_module(PACKAGE + name) for name in names]
        for module in [m for name, m in sys.modules.items() if _is_gluon(name)]:
            vars(module)["range"] = _range
            if hasattr(module, "previous_done"):
                module.previous_done = _nothing
    finally:
        for name in [*filter(_is_gluon, sys.modules), *replaced]:
            del sys.modules[name]
            package, _, last = name.rpartition(".")
            if _is_gluon(name):  # ``from package import module`` reads an attribute
                delattr(sys.modules[package], last)
        for name, module in real.items():
            sys.modules[name] = module
            package, _, last = name.rpartition(".")
            if _is_gluon(name):
                setattr(sys.modules[package], last, module)
    return found
