"""Tests that run in Triton's interpreter, which must be asked for before triton is imported: so
each file that has some is run once more, in a process of its own."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

# Runs the files that each line names, in a fork of itself, and answers with pytest's exit code.
FORKS = """
import json, os, sys
import pytest, torch
import mamba_eagle.backend.triton.backend, mamba_eagle.devices
for line in sys.stdin:
    output, *files = json.loads(line)
    if not (pid := os.fork()):
        written = os.open(output, os.O_WRONLY)
        os.dup2(written, 1), os.dup2(written, 2)
        code = pytest.main(["-q", "-p", "no:cacheprovider", *files])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def forking() -> subprocess.Popen[str]:
    """A process that has loaded what each file needs, which takes longer than many files' tests."""
    return subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def files_of(item: pytest.Item) -> list[str]:
    """The test's own file and the neighbours that it runs along."""
    assert isinstance(item, pytest.Function)
    names = getattr(item.function, "neighbours", ())
    return [str(path) for path in (item.path, *map(item.path.with_name, names))]


def check(item: pytest.Item) -> None:
    """What a file's ``test_in_the_interpreter`` does."""
    process = forking()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output:
        try:
            print(json.dumps([output.name, *files_of(item)]), file=process.stdin, flush=True)
            code = process.stdout.readline()
        except BaseException:  # it takes too long
            forking.cache_clear()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        assert code == "0\n", output.read()


def make_quicker() -> None:
    """For a process that interprets: what Triton does over and over for each operation of a kernel,
    with the same result, takes more time than what the operations compute."""
    _patch_languages_once()
    _skip_dead_checks()
    _remember_types()
    _look_floats_up()


def _patch_languages_once() -> None:
    """triton.language stays as the first kernel's launch has left it."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_once(function: Callable[..., Any]) -> Any:
        found = languages(function)
        if found and all(each.range.__module__ == interpreter.__name__ for each in found):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = lambda scope: None


def _skip_dead_checks() -> None:
    """Triton does sums of integers again in int64, for an assertion that it then leaves out."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def _remember_types() -> None:
    """Types of the same name are the same; tensors of the same sizes share their shape."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core, np_dtype = tl.core, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    equal, broadcast = core.dtype.__eq__, TritonSemantic.broadcast_impl_value
    checked = TritonSemantic.binary_op_type_checking_impl
    computed = TritonSemantic.computation_type_impl
    np_dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    computation: dict[tuple[Any, ...], Any] = {}

    def remembered_np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            sizes = tuple(type.shape) if type.is_block() else ()
            shape = shapes.setdefault(sizes, self.shape)
            tensors[type.name] = {"shape": shape, "numel": self.numel, "dtype": self.dtype}
        vars(self).update(tensors[type.name], handle=handle, type=type)

    def broadcast_other_shapes(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def computation_type(self: Any, a: Any, a_scalar: bool, b: Any, *more: bool) -> Any:
        key = (a.name, a_scalar, b.name, *more)
        if key not in computation:
            computation[key] = computed(self, a, a_scalar, b, *more)
        return computation[key]

    def check_other_types(self: Any, lhs: Any, rhs: Any, *more: bool, **named: bool) -> Any:
        numbers = len(more) <= 2 and not named and type(lhs) is type(rhs) is core.tensor
        if numbers and lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr():
            return lhs, rhs  # of an operation that divides nothing
        return checked(self, lhs, rhs, *more, **named)

    interpreter._get_np_dtype = remembered_np_dtype
    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    core.block_type.to_ir = lambda self, builder: self
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    TritonSemantic.binary_op_type_checking_impl = check_other_types
    TritonSemantic.computation_type_impl = computation_type
    TritonSemantic.broadcast_impl_value = broadcast_other_shapes


def _look_floats_up() -> None:
    """What a float becomes in another format depends on no more than its first 16 bits, but where
    16 are rounded to, and for numbers of float32 below 1.2e-38."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    @functools.cache
    def table(source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        firsts = np.arange(1 << min(bits, 16)) << max(bits - 16, 0)
        return convert(firsts.astype(f"u{bits // 8}"), source, target, rounding)

    def looked_up(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits, cut = source.primitive_bitwidth, target == tl.bfloat16 and rounding is None
        if bits > 16 and target.primitive_bitwidth > 8 and not cut:
            return convert(numbers, source, target, rounding)
        firsts = np.ascontiguousarray(numbers).view(f"u{bits // 8}") >> max(bits - 16, 0)
        return table(source, target, rounding)[firsts].reshape(numbers.shape)

    interpreter._convert_float = looked_up
