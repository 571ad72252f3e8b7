"""Addresses, for Numba's code: what is there, who computes it, who waits for it, and who will need
it."""

import platform
from collections import namedtuple
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I64 = ir.IntType(64)


def places(words: type) -> Any:
    """The constants of a class for Numba's code, which knows named tuples."""
    own = {name: value for name, value in vars(words).items() if name.isupper()}
    return namedtuple(words.__name__, own)(**own)


@intrinsic
def pointer_to(typing: Any, address: Any) -> Any:
    """What ``numba.carray`` takes."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def call_function(typing: Any, function: Any, arguments: Any, first: Any, last: Any) -> Any:
    """``function(arguments, first, last)``, of addresses."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


# ── words that several threads write; all sequentially consistent ──


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        return builder.load_atomic(_word(builder, given[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Returns what was there."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        return builder.atomic_rmw("xchg", _word(builder, given[0]), given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:
    """Returns what was there."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, given[0]), given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def swap(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Whether ``value`` has taken the place of ``expected``."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        word, order = _word(builder, given[0]), "seq_cst"
        both = builder.cmpxchg(word, given[1], given[2], order, order)
        return builder.zext(builder.extract_value(both, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Within a loop that looks at a word."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def futex(typing: Any, function: Any, number: Any, word: Any, what: Any, value: Any) -> Any:
    """``syscall(number, word, what, value, NULL)``"""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
        kind = ir.FunctionType(I64, [I64], var_arg=True)
        call = builder.inttoptr(given[0], kind.as_pointer())
        return builder.call(call, [*given[1:], I64(0)])

    return types.int64(*[types.int64] * 5), generate


def ask_for(builder: Any, pointer: Any) -> None:
    """Writes an instruction that asks for a cache line (64 bytes) which is read soon. The pointer
    may lead anywhere: what does not exist is not asked for."""
    line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [line, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = (number(i) for i in (0, 3, 1))  # to read it, into all caches, as data
    builder.call(prefetch, [builder.bitcast(pointer, line), *how])
