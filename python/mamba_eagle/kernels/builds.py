"""Triton kernels, compiled by several processes before they are needed.

Triton compiles a kernel when it is first launched with a new kind of arguments: one after the
other, a second or more each. ``dry_run`` finds out which kinds a piece of code needs without
compiling or launching anything, and ``Builders`` compiles them side by side. The results are in
Triton's cache on disk, where the launches that follow find them, and so does every later start.

A dry run takes each launch as done and lets torch's operations run. New memory is zeroed meanwhile,
so that indices which a kernel would have written are valid.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_BUILDERS = 16
_UNINITIALIZED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


class Build(NamedTuple):
    """One kernel for one kind of arguments, as another process can compile it."""

    module: str
    name: str
    data: str  # JSON: signature, constants, attributes and options, as Triton serialises them
    target: tuple[str, Any, int]  # backend, architecture, threads of a warp


# ── what is needed ───────────────────────────────────────────────────────────────────────────


class DryRun:
    """The builds that launches asked for."""

    def __init__(self) -> None:
        self.builds: dict[Build, None] = {}  # a set in order

    def hook(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """In place of compiling: Triton then launches nothing."""
        from triton.runtime.driver import driver  # with the kernels, of which one asks

        target = driver.active.get_current_target()
        data = json.loads(compile["specialization_data"])
        data.pop("key", None)  # a text of Triton's own, which says no more than the rest
        module = fn.module if isinstance(fn.module, str) else fn.module.__name__
        text = json.dumps(data, sort_keys=True)
        named = Build(module, fn.name, text, (target.backend, target.arch, target.warp_size))
        self.builds[named] = None
        return True


class _Zeroed(TorchDispatchMode):
    """torch.empty and its kin give zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALIZED:
            made.zero_()
        return made


@contextlib.contextmanager
def dry_run() -> Iterator[DryRun]:
    """Within, no kernel is compiled or launched that was not before; yields those that would be."""
    from triton import knobs  # an optional package

    run, before = DryRun(), knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = run.hook
    try:
        with _Zeroed():
            yield run
    finally:
        knobs.runtime.jit_cache_hook = before


# ── compiling ────────────────────────────────────────────────────────────────────────────────


def compile_build(build: Build) -> None:
    """Compile one kernel for its target, which need not be a device of this machine.

    Returns at once if Triton's cache has it.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    data = json.loads(build.data)

    def constant(value: Any) -> Any:
        if isinstance(value, str) and tl.dtype.is_dtype(value):
            return tl.dtype(value)
        if isinstance(value, dict) and "constexpr" in value:
            return tl.constexpr(_tuples(value["constexpr"]))
        return _tuples(value)

    keys = [tuple(key) for key in data["constant_keys"]]
    constants = dict(zip(keys, map(constant, data["constant_vals"]), strict=True))
    attributes = {
        tuple(key): value for key, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True)
    }
    signature = {name: _tuples(kind) for name, kind in data["signature"].items()}
    kernel = getattr(importlib.import_module(build.module), build.name)
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: _tuples(value) for name, value in data["options"].items()}
    triton.compile(source, target=GPUTarget(*build.target), options=options)


def _tuples(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _warm() -> None:
    """What every build needs; called while the parent is still loading."""
    import triton.compiler  # noqa: F401

    torch.set_num_threads(1)


class Builders:
    """Processes that compile. Made early, so that they are ready when the first build comes."""

    def __init__(self, processes: int | None = None) -> None:
        count = processes or min(MAX_BUILDERS, max(1, (os.cpu_count() or 1) - 1))
        self.pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
        self._started = [self.pool.submit(_warm) for _ in range(count)]
        self._builds: dict[Build, Future[None]] = {}

    def submit(self, builds: DryRun) -> None:
        """Compile what was not submitted before."""
        for build in builds.builds:
            if build not in self._builds:
                self._builds[build] = self.pool.submit(compile_build, build)

    def finish(self) -> int:
        """Wait for all builds; returns their number. One that fails is left to the launch that
        needs it, which raises the same error with the code around it."""
        for future in self._builds.values():
            with contextlib.suppress(Exception):
                future.result()
        self.pool.shutdown()
        return len(self._builds)
