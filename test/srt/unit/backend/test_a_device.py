"""A device is added by CONTRIBUTING's recipe alone: a Backend, and a line that chooses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from runner_harness import Tiny, greedy, random_prompt
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Host
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.runner import loading


class Far(Host):
    """Memory of its own, which the host does not read directly."""

    def __init__(self) -> None:
        self.copies = 0

    def to_device(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        self.copies += 1
        return super().to_device(values, dtype)


class OwnNorm(LayerOps):
    """Layers as torch computes them, but for one operation that the device has a kernel for."""

    name = "own norm"

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[int] = []  # shared by the copies that groups of ranks get

    def gated_group_rms_norm(self, *operands: Any) -> Tensor:
        self.norms.append(1)
        return super().gated_group_rms_norm(*operands)


class FarBackend(Backend):
    name = "far"


@pytest.mark.parametrize("settings", ["none", "tree", "tree-snapshot"])
def test_a_device_is_a_backend_and_a_line_that_chooses_it(
    tiny: Tiny, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, ops = Far(), OwnNorm()
    chosen = lambda device, dtype, *_: FarBackend(place, dtype, ops)  # noqa: E731
    monkeypatch.setattr(loading, "choose_backend", chosen)
    engine = tiny.engine(settings)
    lives = [engine.start(random_prompt(9, seed), greedy(16)) for seed in range(3)]
    engine.finish(lives)
    for live in lives:
        assert live.output == tiny.plain.choices(live)
    assert place.copies and ops.norms
