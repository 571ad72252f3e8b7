"""Prompt chunks of several requests in one forward pass: what all backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention, PromptSpan
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import Rotation
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.message import PrefillItem


@dataclass
class PrefillPart:
    """One request's chunk in a prefill batch: tokens [first, first + length) of the flat input."""

    item: PrefillItem
    first: int
    length: int

    @property
    def span(self) -> PromptSpan:
        return PromptSpan(self.item.slot, self.item.start, self.length)


def prefill_parts(items: Sequence[PrefillItem]) -> list[PrefillPart]:
    """The items' tokens, one after the other."""
    lengths = [len(item.token_ids) for item in items]
    firsts = [0, *accumulate(lengths)]
    return [PrefillPart(*part) for part in zip(items, firsts, lengths)]


def start_finished(scheme: StateScheme, items: Sequence[PrefillItem], place: Place) -> None:
    """Let the scheme take over the requests whose prompts are over."""
    last = [(item.slot, item.state_slot) for item in items if item.is_last]
    if last:
        scheme.start(*place.to_device(list(zip(*last))))


class PrefillContext(ABC):
    """Prompt chunks of several requests, one after the other in the flat input.

    Reads each request's state, writes it after the chunk, and saves the states that the plan wants
    at positions in between.
    """

    rotation: Rotation | None = None

    def __init__(self, parts: list[PrefillPart], paged: NewTokenAttention | None) -> None:
        """paged: None if the model has no attention layer."""
        self.parts, self.paged = parts, paged

    @property
    def positions(self) -> Tensor:
        starts = [(part.item.start, part.item.start + part.length) for part in self.parts]
        return torch.cat([torch.arange(first, end) for first, end in starts])

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.paged is not None, "the model has no attention layer"
        return self.paged.attend(layer, q, k, v)

    @abstractmethod
    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """xbc [n, conv_dim] before the convolution, dt [n, H] raw -> y [n, H*P] with D skip."""
