"""Other weights in the places of a prepared model's, which captured steps go on to read.

A second model is filled and prepared as at a start, one layer at a time. What a layer then consists
of, packed, fused, rounded or derived, is copied over the old one's, and given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mamba_eagle.layers.adapters import Additions
from mamba_eagle.layers.block import prepare_layers
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.weights import META
from mamba_eagle.models.base import CausalLM, Target
from mamba_eagle.models.rooms import FewBitRooms
from mamba_eagle.parallel.groups import Group
from mamba_eagle.quantization.matrix import Matrix
from mamba_eagle.quantization.policy import Policy

PACKAGE = __name__.split(".")[0]
NO_WEIGHTS = (LayerOps, Additions, Group)  # what layers refer to besides


class OtherForm(Exception):
    """The second model does not hold what the first one holds."""


class RefilledRooms(FewBitRooms):
    """Of the second model. Its layers are given up as soon as they are whole."""

    def __init__(self, old: CausalLM, new: CausalLM, device: torch.device, policy: Policy) -> None:
        """old: prepared. new: its weights come late. Raises: OtherForm; and so does ``put``."""
        self.ops = old._ops
        super().__init__(new, device, policy, self.ops.keeps)
        self.old, self.new = units(old), units(new)
        self.whole = 0  # units that are
        names = {id(module): name for name, module in new.named_modules()}
        self.turns = {
            f"{names[id(module)]}.{leaf}".lstrip("."): number
            for number, unit in enumerate(self.new)
            for module in unit
            for leaf in (*module._parameters, *module._buffers)
        }
        held = [id(module) for unit in self.new for module in unit]
        if len(set(held)) < len(held):
            raise OtherForm  # shared modules would be given up with the first layer

    def turn(self, name: str) -> int:
        return self.turns[name]

    def put(self, target: Target, value: Tensor | Matrix) -> None:
        while self.whole < self.turn(target.name):
            self._settle()
        super().put(target, value)

    def finish(self) -> None:
        while self.whole < len(self.new) - 1:
            self._settle()
        super().finish()
        self._settle()

    def _settle(self) -> None:
        """All tensors of a unit are there."""
        old, new = self.old[self.whole], self.new[self.whole]
        first, self.whole = self.whole, self.whole + 1
        for name in [name for name, turn in self.turns.items() if turn == first]:
            if name in self.layers:
                self.layers.pop(name)[0].assemble()
            self.tensors.pop(name, None)
        prepare_layers(new, self.ops)
        others = [unit[0] for unit in (*self.old[:-1], *self.new[:-1])]
        overwrite(old, new, [] if first < len(self.new) - 1 else others)
        for module in new:
            vars(module).clear()  # and its memory


def units(model: CausalLM) -> list[list[nn.Module]]:
    """The modules of each layer, and then all others."""
    layers = [list(layer.modules()) for layer in model.parts.layers]
    known = {id(module) for layer in layers for module in layer}
    return [*layers, [module for module in model.modules() if id(module) not in known]]


def overwrite(old: list[nn.Module], new: list[nn.Module], others: Iterable[nn.Module]) -> None:
    """Copy what ``new`` holds to where ``old`` holds the same. others: they are left out.

    Raises: OtherForm"""
    for before, after in zip(old, new):
        for derive in vars(before).get("derived", ()):
            derive(after)
    known = {id(other) for other in others}
    places, values = (dict(tensors_in(modules, "", set(known))) for modules in (old, new))
    forms = ({path: form(held) for path, held in found.items()} for found in (places, values))
    if next(forms) != next(forms):
        raise OtherForm
    with torch.inference_mode():
        for path, value in values.items():
            place = places[path]
            for axis, stride in enumerate(place.stride()):
                if stride == 0:  # expanded
                    place, value = place.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
            place.copy_(value)


def form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def tensors_in(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """All that a layer's calls may read, each once, by the way to it: tensors of modules, of the
    products that these hold, and of what closures refer to."""
    if id(thing) in seen or isinstance(thing, NO_WEIGHTS):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.device != META and thing.numel():
            yield path, thing
        return
    for name, part in parts_of(thing):
        yield from tensors_in(part, f"{path}.{name}", seen)


def parts_of(thing: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(thing, dict):
        return thing.items()
    if isinstance(thing, (list, tuple)):
        return enumerate(thing)
    if isinstance(thing, MethodType):
        return [("self", thing.__self__)]
    if isinstance(thing, partial):
        return enumerate((thing.func, *thing.args, *thing.keywords.values()))
    if isinstance(thing, FunctionType):
        return enumerate(cell.cell_contents for cell in thing.__closure__ or ())
    own = isinstance(thing, nn.Module) or type(thing).__module__.startswith(PACKAGE)
    return vars(thing).items() if own and hasattr(thing, "__dict__") else ()
