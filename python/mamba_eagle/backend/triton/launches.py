"""Launches of Triton kernels that find by a short key what an earlier launch has found.

At each launch Triton binds the arguments, asks of each what machine code depends on, and looks for
the kernel under the text of all options. A pass over a prompt is launched kernel by kernel, so that
time bounds it. Here calls with arguments of the same names and types are a *form*. It makes in one
expression the arguments in the order of the parameters and a key, which differs wherever Triton's
own would (``test_launches.py``); the first launch with a key is Triton's, and the kernel that it
returns is launched by all that follow.

Beside ``JITFunction.run``, which is replaced, and its ``params`` this needs of Triton what is
public: ``compiled[grid](*arguments, stream=…)``. With known versions and no profiler it goes past
that, to ``compiled.run``. Not noticed are settings of Triton's and global variables of kernels that
change after the first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, nn
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

triton_run = JITFunction.run

RUNTIME = knobs.runtime
DIRECT = triton.__version__.startswith(("3.6.", "3.9."))  # ``CompiledKernel.run`` is the same
TENSORS = (Tensor, nn.Parameter)
# What the others can be that are keyed by value; anything else is left to Triton.
CONSTANTS = (type(None), bool, str, tl.dtype, JITFunction)


class Form:
    """Calls of a kernel with arguments of the same names and types."""

    def __init__(
        self, kernel: JITFunction[Any], positional: int, named: Sequence[str], types: Sequence[type]
    ) -> None:
        """types: of the positional arguments, then of the named ones, options included."""
        parameters = {each.name: each for each in kernel.params}
        self.names = list(parameters)
        given = [*self.names[:positional], *named]
        defaults = {
            f"default_{name}": each.default
            for name, each in parameters.items()
            if name not in given and each.has_default
        }
        self.kernels: dict[object, Any] = {}  # compiled, by key
        self.bind: Callable[..., tuple[object, tuple[Any, ...]]] | None = None
        terms = [term(name, kind, parameters.get(name)) for name, kind in zip(given, types)]
        bound = [name if name in given else f"default_{name}" for name in self.names]
        if len(given) != len(types) or None in terms or not {*bound} <= {*given, *defaults}:
            return  # not a launch that Triton would take, or one with other types
        key, arguments = "".join(filter(None, terms)), "".join(f"{name}, " for name in bound)
        self.bind = eval(f"lambda {', '.join(given)}: (({key}), ({arguments}))", defaults)


def term(name: str, kind: type, parameter: Any) -> str | None:
    """What an argument of this type adds to the key; None: unknown. parameter: None for options."""
    if parameter is None or parameter.is_constexpr:
        return f"{name}, " if kind in (*CONSTANTS, int, float) else None
    if kind in TENSORS:
        return f"{name}.dtype, {name}.data_ptr() & 15 == 0, "
    if kind is int:  # which are 1, which multiples of 16, and which need 64 bits
        exact = f"{name} == 1, {name} & 15 == 0, "
        return f"{'' if parameter.do_not_specialize else exact}{name} >> 31, "
    if kind is float:
        return ""
    return f"{name}, " if kind in CONSTANTS else None


_forms: dict[tuple[object, ...], Form] = {}


def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """In place of ``JITFunction.run``."""
    if warmup or self.pre_run_hooks:
        return triton_run(self, *args, grid=grid, warmup=warmup, **options)
    types = map(type, chain(args, options.values()))
    called = (id(self), len(args), *options, *types)
    form = _forms.get(called)
    if form is None:
        form = _forms[called] = Form(self, len(args), list(options), called[2 + len(options) :])  # type: ignore[arg-type]
    if form.bind is None:
        return triton_run(self, *args, grid=grid, warmup=False, **options)
    device = driver.active.get_current_device()
    key, bound = form.bind(*args, **options)
    compiled = form.kernels.get((device, key))
    if compiled is None:
        compiled = triton_run(self, *args, grid=grid, warmup=False, **options)
        if compiled is not None:
            form.kernels[device, key] = compiled
        return compiled
    sizes = (*(grid(dict(zip(form.names, bound))) if callable(grid) else grid), 1, 1)
    stream = driver.active.get_current_stream(device)
    if DIRECT and not (RUNTIME.launch_enter_hook.calls or RUNTIME.launch_exit_hook.calls):
        own = (compiled.function, compiled.packed_metadata)
        compiled.run(*sizes[:3], stream, *own, None, None, None, *bound)
    else:
        compiled[sizes](*bound, stream=stream)
    return compiled


def install() -> None:
    """All launches of this process from now on. Kernels must live as long as it does."""
    JITFunction.run = run
