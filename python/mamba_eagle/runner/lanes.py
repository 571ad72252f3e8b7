"""Drafted lanes: one new token in each, behind a request's tokens and the lanes above it.

Most lanes are never accepted, and those that are get true entries in the next step. So nothing of
them stays: keys and values stand in spare slots, what they feed into a recurrence in free rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.tree_attention.naive import masked_attention
from mamba_eagle.layers.attention import Attention
from mamba_eagle.runner.contexts import FusedTreeAttention, TreeAttention, VerifyContext
from mamba_eagle.runner.pools import KVPool
from mamba_eagle.runner.verify import DeferredVerify, Step, VerifyScheme


class LaneAttention(ABC):
    """Attention of the newest lanes to their prefix and to the lanes above them."""

    @abstractmethod
    def advance(self, above: Tensor) -> None:
        """The next lanes continue the lanes ``above`` [b, topk] of the last ones."""

    @abstractmethod
    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*topk, heads, D]; k, v [b*topk, kv_heads, D] -> [b*topk, heads, D]."""


def seen_by_next(seen: Tensor | None, above: Tensor) -> Tensor:
    """Which lanes the next ones see: those that the lanes ``above`` [b, topk] saw, and themselves.

    seen: [b, topk, lanes so far] bool, by the last lanes; None at first, when there are none.
    """
    b, topk = above.shape
    own = torch.eye(topk, dtype=torch.bool, device=above.device).expand(b, -1, -1)
    if seen is None:
        return own
    index = above[..., None].expand(-1, -1, seen.shape[2])
    return torch.cat([seen.gather(1, index), own], dim=2)


class GatheredLanes(LaneAttention):
    """Keys and values of prefix and lanes side by side, under a mask."""

    def __init__(
        self, pool: KVPool, layers: int, slot_table: Tensor, slots: Tensor, prefix: Tensor
    ) -> None:
        """slot_table [R, positions]; slots, prefix [b]: positions of the table that lanes see."""
        longest = int(prefix.max())
        read = slot_table[slots, :longest]
        hidden = torch.arange(longest, device=slots.device) >= prefix[:, None]
        bias = torch.zeros(hidden.shape, device=slots.device)
        self.prefix_bias = bias.masked_fill_(hidden, float("-inf"))  # [b, S]
        self.kv = [pool.read(layer, read) for layer in range(layers)]
        self.seen: Tensor | None = None  # [b, topk, lanes so far] bool

    def advance(self, above: Tensor) -> None:
        self.seen = seen = seen_by_next(self.seen, above)
        bias = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))
        before = self.prefix_bias[:, None].expand(-1, above.shape[1], -1)
        self.mask_bias = torch.cat([before, bias], dim=2)

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = self.mask_bias.shape[:2]
        keys, values = (
            torch.cat([seen, new.unflatten(0, shape).to(seen.dtype)], dim=1)
            for seen, new in zip(self.kv[layer.index], (k, v), strict=True)
        )
        self.kv[layer.index] = (keys, values)
        q = q.unflatten(0, shape)
        out = masked_attention(q, keys, values, self.mask_bias.to(q.dtype), layer.scale)
        return out.flatten(0, 1)


class FusedLanes(LaneAttention, FusedTreeAttention):
    """On a CPU the lanes of a request are a forest behind its prefix, in spare slots."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> None:
        """max_lanes: how many each request has room for, in all steps."""
        b = len(slots)
        nothing = torch.empty(b, 0, dtype=torch.int64)
        FusedTreeAttention.__init__(self, pool, slot_table, slots, prefix, nothing, nothing)
        spare = pool.padding_slot + 1 + np.arange(b * max_lanes)
        self.spare = spare.reshape(b, max_lanes)

    def advance(self, above: Tensor) -> None:
        table, slots, prefix, _, parents = self.indices
        first, topk = parents.shape[1], above.shape[1]
        own = np.ascontiguousarray(self.spare[:, : first + topk])
        # the first lanes are roots: each is its own parent
        roots = np.tile(np.arange(topk), (len(slots), 1))
        parent = above.numpy() + first - topk if first else roots
        self.indices = (table, slots, prefix, own, np.concatenate([parents, parent], axis=1))

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FusedTreeAttention.attend(self, layer, q, k, v)


class LaneRows:
    """Recurrent state of lanes: each is a tree of one node, whose chain is its request's chain and
    the lanes above it."""

    def __init__(self, scheme: DeferredVerify, slots: Tensor, max_lanes: int) -> None:
        self.scheme = scheme
        self.slots = slots
        self.rows = scheme.free_rows(slots, max_lanes)  # [b, lanes of all steps]
        self.state_slots = scheme.table.state_slot[slots]
        self.path = scheme.path[slots][:, None]  # [b, lanes, places + …], before their own rows
        self.length = scheme.journal_len[slots]
        self.used = 0

    def advance(self, above: Tensor) -> None:
        b, topk = above.shape
        path = self.path.gather(1, above[..., None].expand(-1, -1, self.path.shape[2]))
        own = self.rows[:, self.used : self.used + topk]
        ones = torch.ones(b * topk, 1, 1, dtype=torch.bool, device=above.device)
        step = Step(
            slots=self.slots.repeat_interleave(topk),
            state_slots=self.state_slots.repeat_interleave(topk),
            rows=own.reshape(-1, 1),
            parents=torch.zeros(b * topk, 1, dtype=torch.int64, device=above.device),
            ancestors=ones,
            path=path.flatten(0, 1),
            journal_len=self.length.repeat_interleave(topk),
        )
        self.scheme.begin_step(step)
        end = (self.scheme.history + self.length)[:, None, None].expand(-1, topk, -1)
        self.path = path.scatter(2, end, own[..., None] + self.scheme.history)
        self.length = self.length + 1
        self.used += topk


class Lanes:
    """The lanes of b requests, a step of ``topk`` lanes at a time."""

    def __init__(
        self, attention: LaneAttention | None, rows: LaneRows | None, scheme: VerifyScheme
    ) -> None:
        """attention, rows: None where the drafter has no such layers."""
        self.attention, self.rows, self.scheme = attention, rows, scheme

    def context(self, above: Tensor, positions: Tensor) -> VerifyContext:
        """Of the next lanes, which continue ``above`` [b, topk] of the last ones (at first the one
        root: zeros). positions [b]: where the lanes stand in their sequences."""
        for part in (self.attention, self.rows):
            if part is not None:
                part.advance(above)
        paged: TreeAttention | None = self.attention
        return VerifyContext(self.scheme, paged, positions.repeat_interleave(above.shape[1]))


def lane_attention(
    pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
) -> LaneAttention | None:
    """None if the pool has no layers. prefix [b]: how many positions of the table lanes see."""
    layers = pool.k.shape[0]
    if not layers:
        return None
    if numba_math.usable(pool.k.device, pool.k.dtype):
        return FusedLanes(pool, slot_table, slots, prefix, max_lanes)
    if gpu.usable(pool.k.device, pool.k.dtype):
        from mamba_eagle.runner.triton_attention import TritonLanes  # needs triton

        return TritonLanes(pool, slot_table, slots, prefix, max_lanes)
    return GatheredLanes(pool, layers, slot_table, slots, prefix)
