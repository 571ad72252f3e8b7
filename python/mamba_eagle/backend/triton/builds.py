"""Triton kernels, compiled by several processes before they are needed.

Triton compiles a kernel when it is first launched with a new kind of arguments: one after the
other, a second or more each. ``dry_run`` finds out which kinds a piece of code needs without
compiling or launching anything, and ``Builders`` compiles them side by side. The results are in
Triton's cache on disk, where the launches that follow find them, and so does every later start.

A dry run takes each launch as done and lets torch's operations run. New memory is zeroed meanwhile,
so that indices which a kernel would have written are valid. Kernels that this process has compiled
before are not launched either: they would read what others have not written.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mamba_eagle.message.lifetime import die_with_parent, ignore_stops, module_command

log = logging.getLogger("mamba_eagle.runner")

MAX_BUILDERS = 16
BUILDER = "mamba_eagle.backend.triton.builds"  # this file, run by itself: ``main``
SIZES = ("shape", "strides")  # of a tensor descriptor: a kernel serves all


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
        target = driver.active.get_current_target()
        data = json.loads(compile["specialization_data"])
        data.pop("key", None)  # a text of Triton's own, which says no more than the rest
        module = fn.module if isinstance(fn.module, str) else fn.module.__name__
        text = json.dumps(data, sort_keys=True)
        named = Build(module, fn.name, text, (target.backend, target.arch, target.warp_size))
        self.builds[named] = None
        return True


@contextlib.contextmanager
def _zeroed() -> Iterator[None]:
    """torch.empty and its kin give zeros."""

    def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **options: make(*args, **options).zero_()

    with torch.device("cpu"):
        torch.empty(0)  # now torch lists what heeds a default device, not while that is replaced
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            make = getattr(owner, name)
            setattr(owner, name, zeroed(make))
            stack.callback(setattr, owner, name, make)
        yield


def _kind(value: object) -> object:
    """Equal for arguments that Triton compiles one kernel for; not always the other way round."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_kind, value))
    if isinstance(value, (TensorDescriptor, GluonDescriptor)):
        # what else there is depends on Triton's version
        return _kind([each for name, each in vars(value).items() if name not in SIZES])
    return type(value), value


@contextlib.contextmanager
def _nothing_launched() -> Iterator[None]:
    """Kernels are at most looked up, as for Triton's own warm-up of one; of those that are tuned
    when they are first launched, each form. Once for each kind of arguments: the layers of a model
    ask for the same ones, and looks took seconds of a start."""
    run, tune = JITFunction.run, Autotuner.run
    asked: set[tuple[object, ...]] = set()

    def looked_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kinds = (id(self), _kind(args), _kind(tuple(sorted(options.items()))))
        if kinds in asked:
            return None
        asked.add(kinds)
        return run(self, *args, grid=grid, warmup=True, **options)

    def every_form(self: Any, *args: Any, **options: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **options, **config.all_kwargs())

    JITFunction.run, Autotuner.run = looked_up, every_form
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune


@contextlib.contextmanager
def dry_run() -> Iterator[DryRun]:
    """Within, no kernel is compiled or launched that was not before; yields those that would be."""
    run, before = DryRun(), knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = run.hook
    try:
        with _zeroed(), _nothing_launched():
            yield run
    finally:
        knobs.runtime.jit_cache_hook = before


# ── compiling ────────────────────────────────────────────────────────────────────────────────


def compile_build(build: Build) -> None:
    """Compile one kernel for its target, which need not be a device of this machine.

    Returns at once if Triton's cache has it.
    """
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
    while not isinstance(kernel, JITFunction):  # what tunes it
        kernel = kernel.fn
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constants, attributes)
    options = {name: _tuples(value) for name, value in data["options"].items()}
    triton.compile(source, target=GPUTarget(*build.target), options=options)


def _tuples(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main() -> None:
    """A process that compiles: a build per line of standard input, an answer per line of output.

    Not of multiprocessing, whose processes would run the parent's main script once more.
    """
    ignore_stops()
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        module, name, data, target = json.loads(line)
        try:
            compile_build(Build(module, name, data, tuple(target)))
            problem = ""
        except Exception as error:  # the launch that needs the kernel raises it again
            problem = f"{name}: {error!r}"
        print(json.dumps(problem), file=answers, flush=True)


class Builders:
    """Processes that compile. Made early: while weights are loaded, they import what they need."""

    def __init__(self, processes: int | None = None) -> None:
        count = processes or min(MAX_BUILDERS, max(1, (os.cpu_count() or 1) - 1))
        command = module_command(BUILDER)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]

    def build(self, run: DryRun) -> int:
        """Compile all that a dry run found, and end; returns their number. What fails is left to
        the launch that needs it, which raises the same error with the code around it."""
        waiting, problems = deque(run.builds), list[str]()

        def work(process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(IndexError, OSError):  # nothing is left; the process has ended
                while True:
                    build = waiting.popleft()
                    process.stdin.write(json.dumps(build) + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                    problems.append(json.loads(answer) if answer else f"{build.name}: no answer")

        with ThreadPoolExecutor(len(self.processes)) as threads:
            list(threads.map(work, self.processes))
        self.end()
        for problem in filter(None, problems):
            log.warning("not built ahead: %s", problem[:200])
        return len(run.builds)

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.wait()


class KernelBuilds:
    """All kernels of a server, built before it is ready; and the note, in Triton's cache, that a
    server like it has done so before."""

    def __init__(self, about: str, processes: int | None = None) -> None:
        """about: everything that decides which kernels there are, beside the code."""
        self.note = Path(knobs.cache.dir, f"mamba-eagle-{_digest(about)}.built")
        self.builders = None if self.note.exists() else Builders(processes)

    def build(self, rehearse: Callable[[], None]) -> None:
        """rehearse: launches everything that serving can need."""
        if self.builders is None:
            return
        began = time.perf_counter()
        with dry_run() as run:
            rehearse()
        rehearsed = time.perf_counter()
        count = self.builders.build(run)
        ended = time.perf_counter()
        log.info(
            "%d kernels: found in %.1f s, built in %.1f s",
            count,
            rehearsed - began,
            ended - rehearsed,
        )
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.touch()


def _digest(about: str) -> str:
    """A name for these kernels: other code, sizes or compilers give another."""
    seen = hashlib.sha256(f"{triton.__version__} {torch.__version__} {about}".encode())
    package = Path(__file__).parents[2]
    for path in sorted([*package.glob("kernels/**/*.py"), *package.glob("backend/**/*.py")]):
        seen.update(path.read_bytes())
    return seen.hexdigest()[:32]


if __name__ == "__main__":
    main()
