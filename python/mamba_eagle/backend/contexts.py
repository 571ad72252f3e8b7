"""The context of a forward pass over tree nodes, lanes or blocks (see layers/context.py)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mamba_eagle.backend.attention import BlockRowAttention, LaneAttention, NewTokenAttention
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.layers.context import AttentionView, ForwardContext
from mamba_eagle.layers.recurrent import Recurrent


class VerifyContext(ForwardContext):
    """The nodes of b trees: attention under the tree mask, recurrence by the state scheme."""

    def __init__(
        self,
        scheme: StateScheme,
        layout: Any,
        attention: NewTokenAttention | None,
        positions: Tensor,
    ) -> None:
        """layout: as returned by the scheme. attention: None if the model has no attention layer.
        positions: [b*T] int64, of the nodes."""
        self.scheme, self.layout = scheme, layout
        self.paged, self.positions = attention, positions

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        return self.scheme.run(layers, hidden, self, self.layout)

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.paged is not None
        return self.paged.attend(layer, q, k, v)

    def gates(self, layer: Recurrent, raw: Tensor) -> Tensor:
        return self.scheme.gates_of(layer, raw)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        return self.scheme.verify(layer, self.layout, channels, raw)


class BlockContext(ForwardContext):
    """The rows of b drafted blocks, which no recurrent layer processes."""

    def __init__(self, attention: BlockRowAttention, positions: Tensor) -> None:
        """positions: [b*N] int64, of the rows."""
        self.paged, self.positions = attention, positions

    def attention(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.paged.attend(layer, q, k, v)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        raise AssertionError("block drafters consist of attention layers")


# ── drafted lanes: one new token in each, following a request's tokens and the lanes above it ──
#
# Most lanes are never accepted, and the accepted tokens become entries of their own in the next
# step. So lanes are not kept: their keys and values are written to spare KV slots, their recurrent
# inputs to free rows.


class LaneRows:
    """Recurrent state of lanes. Each lane is a tree with one node, whose journal consists of its
    request's journal and the rows of the lanes above it."""

    def __init__(self, scheme: StateScheme, stem: TreeLayout, max_depth: int) -> None:
        """stem: as returned by ``scheme.stem``, with rows for the lanes of all depths. max_depth:
        number of times that ``advance`` may be called, at most."""
        self.scheme, self.stem, self.used = scheme, stem, 0
        self.history = stem.tail.shape[1]
        # journal and tail of each lane of the previous depth; at first of one lane, the root
        spare = stem.journal.new_zeros(len(stem.slots), max_depth)
        self.journal = torch.cat([stem.journal, spare], dim=1)[:, None]  # [b, lanes, M]
        self.tail = stem.tail[:, None]  # [b, lanes, K-1]
        self.length = stem.journal_len  # [b]

    def advance(self, above: Tensor) -> Any:
        """The layout of the next lanes; lane i of a request continues lane ``above[:, i]`` of the
        previous ones. above: [b, topk] int64."""
        b, topk = above.shape
        journal = self.journal.gather(1, above[..., None].expand(-1, -1, self.journal.shape[2]))
        tail = self.tail.gather(1, above[..., None].expand(-1, -1, self.history))
        own = self.stem.rows[:, self.used : self.used + topk]
        layout = self.scheme.lane_layout(
            TreeLayout(
                slots=self.stem.slots.repeat_interleave(topk),
                state_slots=self.stem.state_slots.repeat_interleave(topk),
                journal=journal.flatten(0, 1),
                journal_len=self.length.repeat_interleave(topk),
                rows=own.reshape(-1, 1),
                parents=own.new_zeros(b * topk, 1),
                ancestors=None,
                tail=tail.flatten(0, 1),
            )
        )
        end = self.length[:, None, None].expand(-1, topk, -1)
        self.journal = journal.scatter(2, end, own[..., None])
        self.tail = torch.cat([tail, own[..., None] + self.history], dim=2)[:, :, 1:]
        self.length = self.length + 1
        self.used += topk
        return layout


class Lanes:
    """The lanes of b requests, one depth of ``topk`` lanes at a time."""

    def __init__(
        self, attention: LaneAttention | None, rows: LaneRows | None, scheme: StateScheme
    ) -> None:
        """attention, rows: None if the drafter has no such layers."""
        self.attention, self.rows, self.scheme = attention, rows, scheme

    def context(self, above: Tensor, positions: Tensor) -> VerifyContext:
        """The context of a forward pass over the next lanes.

        above: [b, topk] int64, the lanes of the previous depth that they continue (at first the
        root: zeros). positions: [b] int64, of the new lanes in their sequences.
        """
        if self.attention is not None:
            self.attention.advance(above)
        layout = None if self.rows is None else self.rows.advance(above)
        lane_positions = positions.repeat_interleave(above.shape[1])
        return VerifyContext(self.scheme, layout, self.attention, lane_positions)
