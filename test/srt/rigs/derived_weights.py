"""What of a runner is made of weights: found by looking, so that nothing can be forgotten."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import ChangeModel, Generate, Weights
from mamba_eagle.offline import OfflineEngine

Sums = dict[str, bytes]  # by the way to the tensor


def weights_in(folder: Path) -> ChangeModel:
    return ChangeModel(weights=Weights(target=str(folder), version=folder.name))


def texts(config: EngineConfig, runner: Any, seed: int) -> dict[str, list[int]]:
    """Some, one of which is continued from rows, so that what is derived at the first use is
    there."""
    engine, rng = OfflineEngine(config, runner), random.Random(seed)
    length, vocab = 40 + 9 * seed, runner.ready.vocab_size
    prompts = [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(2)]
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate([*prompts, prompts[0][:-5]]):
        how = SamplingParams(max_new_tokens=8, temperature=number % 2, seed=3, ignore_eos=True)
        engine.add(Generate(rid=f"{seed} {number}", token_ids=prompt, sampling=how))
        while not engine.idle and number > 0:
            for output in engine.step():
                found.setdefault(output.rid, []).extend(output.token_ids)
    return found


class Seen:
    """Of a runner that has served: ``sums`` of what is the same after other texts."""

    def __init__(self, config: EngineConfig, runner: Any) -> None:
        self.texts = texts(config, runner, 1)
        before = sums(runner)
        self.texts |= texts(config, runner, 2)
        after = sums(runner)
        self.sums = {way: value for way, value in before.items() if after.get(way) == value}


def made_of_weights(a: Seen, b: Seen) -> list[str]:
    """Ways to what differs between runners that differ in their weights alone."""
    return [way for way, value in a.sums.items() if value != b.sums.get(way, value)]


def sums(runner: Any) -> Sums:
    """Of one runner, or of several ranks."""
    ranks = getattr(runner, "runners", runner)
    return {way: digest(found) for way, found in reached(ranks)}


def digest(values: Tensor | np.ndarray) -> bytes:
    if isinstance(values, Tensor):
        values = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


def reached(start: Any) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """Every tensor that the package's objects refer to, and every array, once, each with the
    shortest way there."""
    beside = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("mamba_eagle")
        for value in vars(module).values()
        if isinstance(value, WeakKeyDictionary)
    ]
    waiting, seen, held = deque([("", start)]), {id(start)}, []
    while waiting:
        way, thing = waiting.popleft()
        held.append(thing)  # so that no other object gets its id
        if isinstance(thing, (Tensor, np.ndarray)):
            if isinstance(thing, np.ndarray) or thing.device.type != "meta":
                yield way, thing
            continue
        parts = list(parts_of(thing))
        parts += [(f"beside{i}", each[thing]) for i, each in enumerate(beside) if has(each, thing)]
        for name, part in parts:
            if id(part) not in seen and name != "scratch":  # in which anything is, from the start
                seen.add(id(part))
                waiting.append((f"{way}.{name}", part))


def has(beside: WeakKeyDictionary[Any, Any], thing: Any) -> bool:
    try:
        return thing in beside
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return False


def parts_of(thing: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(thing, dict):
        return [(str(key)[:40], value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, deque)):
        return list(enumerate(thing))
    if isinstance(thing, MethodType):
        return [("self", thing.__self__)]
    if isinstance(thing, partial):
        return list(enumerate((thing.func, *thing.args, *thing.keywords.values())))
    if isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return list(enumerate([*cells, *(thing.__defaults__ or ())]))
    if isinstance(thing, type) or not type(thing).__module__.startswith("mamba_eagle"):
        return vars(thing).items() if isinstance(thing, torch.nn.Module) else ()
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return [*found.items(), *getattr(thing, "__dict__", {}).items()]
