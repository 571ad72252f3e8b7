"""Attention of new tokens to earlier ones in KV slots: the interfaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from torch import Tensor

from mamba_eagle.layers.attention import Attention


class NewTokenAttention(Protocol):
    """Attention of a step's new tokens, wherever keys and values are."""

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""


class LaneAttention(ABC):
    """Attention of the newest lanes to their prefix and to the lanes above them."""

    @abstractmethod
    def advance(self, above: Tensor) -> None:
        """The next lanes continue the lanes ``above`` [b, topk] of the last ones."""

    @abstractmethod
    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*topk, heads, D]; k, v [b*topk, kv_heads, D] -> [b*topk, heads, D]."""


class PromptSpan(NamedTuple):
    """The next tokens of a prompt, positions [start, start + length) of request slot ``slot``."""

    slot: int
    start: int
    length: int


class TreeNodes(NamedTuple):
    """Where the nodes of b trees read and write keys and values.

    They see the tokens before the root, their ancestors and themselves.
    """

    slot_table: Tensor  # [R, positions] KV slot of each position, by request slot
    slots: Tensor  # [b] request slots
    prefix: Tensor  # [b] the root's position
    kv_slots: Tensor  # [b, T] the nodes' own
    parents: Tensor  # [b, T] node indices
    ancestors: Tensor  # [b, T, T] bool
    ancestor_bits: Tensor | None = None  # [b, T] int64, the same, from backends that want it
