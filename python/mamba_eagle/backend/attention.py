"""Attention of new tokens to earlier ones in KV slots: the interfaces."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from torch import Tensor

from mamba_eagle.layers.block_attention import BlockAttention
from mamba_eagle.layers.context import AttentionView


class NewTokenAttention(Protocol):
    """Attention of a step's new tokens; stores their keys and values where needed."""

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""


class BlockRowAttention(Protocol):
    """Attention of the rows of drafted blocks to their context and to each other. Their keys and
    values are written to spare KV slots."""

    def attend(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*N, heads, D]; k, v [b*N, kv_heads, D] -> [b*N, heads, D]."""


class LaneAttention(ABC):
    """Attention of the newest lanes to their prefix, to the lanes above them and to themselves."""

    @abstractmethod
    def advance(self, above: Tensor) -> None:
        """Move on to the next lanes; lane i of a request continues lane ``above[:, i]`` of the
        previous ones. above: [b, topk] int64."""

    @abstractmethod
    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*topk, heads, D]; k, v [b*topk, kv_heads, D] -> [b*topk, heads, D]."""


class PromptSpan(NamedTuple):
    """The next tokens of a prompt, positions [start, start + length) of request slot ``slot``."""

    slot: int
    start: int
    length: int


class TreeNodes(NamedTuple):
    """Where the nodes of b trees read and write keys and values.

    A node attends to the tokens before the root, to its ancestors and to itself.
    """

    slot_table: Tensor  # [R, positions] int64, KV slot of each position, by request slot
    slots: Tensor  # [b] int64, request slots
    prefix: Tensor  # [b] int64, position of the root
    kv_slots: Tensor  # [b, T] int64, of the nodes
    parents: Tensor  # [b, T] int64, node indices
    ancestors: Tensor  # [b, T, T] bool, each node itself included
    ancestor_bits: Tensor | None = None  # [b, T] int64, ancestors as bits, if the scheme has them


class BlockRows(NamedTuple):
    """Where the N rows of b drafted blocks read and write keys and values; row i stands at position
    ``prefix + i``."""

    slot_table: Tensor  # [R, positions] int64, KV slot of each position, by request slot
    slots: Tensor  # [b] int64, request slots
    prefix: Tensor  # [b] int64, tokens of the context
    kv_slots: Tensor  # [b, N] int64, spare ones for the rows
