"""Addresses, for Numba's code: what is there, who computes it, who waits for it, and who will need
it."""

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I64 = ir.IntType(64)


def generated(write: Callable[..., Any]) -> Any:
    """What an intrinsic gives Numba beside its types: ``write(builder, *values)`` writes the code,
    and returns its result, if it has one."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        made = write(builder, *given)
        return context.get_dummy_value() if made is None else made

    return generate


@intrinsic
def pointer_to(typing: Any, address: Any) -> Any:
    """What ``numba.carray`` takes."""
    kind = ir.IntType(8).as_pointer()
    return types.voidptr(types.int64), generated(lambda builder, at: builder.inttoptr(at, kind))


@intrinsic
def call_function(typing: Any, function: Any, arguments: Any, first: Any, last: Any) -> Any:
    """``function(arguments, first, last)``, of addresses."""

    def write(builder: Any, function: Any, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(function, kind.as_pointer()), values)

    return types.void(*[types.int64] * 4), generated(write)


# ── words that several threads write; all sequentially consistent ──

ORDER = "seq_cst"


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


def _changed_by(operation: str) -> Any:
    return generated(lambda b, at, by: b.atomic_rmw(operation, _word(b, at), by, ORDER))


@intrinsic
def load(typing: Any, address: Any) -> Any:
    return types.int64(types.int64), generated(lambda b, at: b.load_atomic(_word(b, at), ORDER, 8))


@intrinsic
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Returns what was there."""
    return types.int64(types.int64, types.int64), _changed_by("xchg")


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:
    """Returns what was there."""
    return types.int64(types.int64, types.int64), _changed_by("add")


@intrinsic
def swap(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Whether ``value`` has taken the place of ``expected``."""

    def write(builder: Any, at: Any, expected: Any, value: Any) -> Any:
        both = builder.cmpxchg(_word(builder, at), expected, value, ORDER, ORDER)
        return builder.zext(builder.extract_value(both, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), generated(write)


@intrinsic
def pause(typing: Any) -> Any:
    """Within a loop that looks at a word."""

    def write(builder: Any) -> None:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])

    return types.void(), generated(write)


@intrinsic
def futex(typing: Any, function: Any, number: Any, word: Any, what: Any, value: Any) -> Any:
    """``syscall(number, word, what, value, NULL)``"""
    kind = ir.FunctionType(I64, [I64], var_arg=True).as_pointer()
    write = generated(lambda b, at, *values: b.call(b.inttoptr(at, kind), [*values, I64(0)]))
    return types.int64(*[types.int64] * 5), write


def ask_for(builder: Any, pointer: Any) -> None:
    """Writes an instruction that asks for a cache line (64 bytes) which is read soon. The pointer
    may lead anywhere: what does not exist is not asked for."""
    line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [line, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = (number(i) for i in (0, 3, 1))  # to read it, into all caches, as data
    builder.call(prefetch, [builder.bitcast(pointer, line), *how])
