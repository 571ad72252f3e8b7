"""Attention over the paged pool by FlashInfer (https://docs.flashinfer.ai): prompts, and trees.

FlashInfer plans each batch on the host, from the lengths of its sequences. The lengths of prompts
are in the plan that the runner executes. The lengths of running requests are known only to the
device while a step is in flight, so the Triton kernel handles trees and plain decoding;
``FlashInferTrees`` is the reference that it is tested and measured against.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from mamba_eagle.backend.attention import PromptSpan
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.torch.attention import CausalAttention
from mamba_eagle.layers.context import AttentionView

log = logging.getLogger("mamba_eagle.runner")

HEAD_DIMS = (64, 128, 256)  # head sizes that FlashInfer has kernels for
TILE = 128  # rows of queries of the largest tile
SPARE_BYTES = 2**20  # for what is beside the sums, and alignment
# fa3 is faster for long prompts and takes five times as long to compile; no masks
BACKEND = "fa2"


class _Wrappers:
    """Two FlashInfer wrappers that take turns, each holding one plan.

    A plan is written to pinned memory, from which the device copies it in stream order. It must not
    be overwritten before, although the host may be a step ahead. So before making its next plan, a
    wrapper waits for the copy of its previous one. This hardly ever takes time, because the other
    wrapper was used in between.
    """

    def __init__(self, device: torch.device, heads: int, kv_heads: int, size: int) -> None:
        room = workspace_bytes(heads, kv_heads, size, multiprocessors(device))
        workspace = torch.empty(room, dtype=torch.uint8, device=device)
        self.turns = [
            (
                BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=BACKEND),
                torch.cuda.Event(),
            )
            for _ in range(2)
        ]

    def planned(self, *args: Any, **options: Any) -> BatchPrefillWithPagedKVCacheWrapper:
        """The next wrapper, after calling its ``plan`` with these arguments."""
        self.turns.reverse()
        wrapper, copied = self.turns[0]
        copied.synchronize()
        wrapper.plan(*args, **options)
        copied.record()
        return wrapper


_wrappers = cache(_Wrappers)  # by device and heads


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def workspace_bytes(heads: int, kv_heads: int, size: int, multiprocessors: int) -> int:
    """Room for the sums of any plan, whatever its lengths.

    Keys are only shared out where two programs per multiprocessor have room for all shares
    (``PrefillPlan`` in FlashInfer's scheduler.cuh). A program has one key head and a tile of
    queries; each share's sums and their weight are float32, for all query heads.
    """
    tiles = max(1, 2 * multiprocessors // kv_heads)
    return heads * tiles * TILE * (size + 1) * 4 + SPARE_BYTES


def _starts(lengths: Sequence[int]) -> Tensor:
    """Start of each part and end of the last: [n] lengths -> [n + 1] int32, on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class FlashInferAttention:
    """Attention of the new tokens of several requests to KV slots, planned at the first layer."""

    def __init__(
        self,
        pool: KVPool,
        write_slots: Tensor,
        read_slots: Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        mask: Tensor | None = None,
    ) -> None:
        """Args:
        write_slots: [n] int64, KV slots of the new tokens.
        read_slots: [sum of keys] int64, KV slots to read, by request, each with its new tokens
            last.
        queries, keys: [requests], number of new tokens and of keys per request; queries add up
            to n.
        mask: [sum of queries × keys] bool, the keys that each new token attends to, by request;
            None: all keys up to the token itself.
        """
        self.pool, self.write_slots = pool, write_slots
        ones = torch.ones(len(keys), dtype=torch.int32)  # tokens in each request's last page
        self.pages = (_starts(queries), _starts(keys), read_slots.int(), ones)
        self.mask = mask
        self.wrapper: BatchPrefillWithPagedKVCacheWrapper | None = None

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""
        self.pool.write(layer.index, self.write_slots, k, v)
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        if self.wrapper is None:
            heads = (q.shape[1], k.shape[1], q.shape[2])
            self.wrapper = _wrappers(q.device, *heads).planned(
                *self.pages,
                *heads,
                1,  # page size
                custom_mask=self.mask,
                causal=self.mask is None,
                sm_scale=layer.scale,
                q_data_type=q.dtype,
                kv_data_type=keys.dtype,
            )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self.wrapper.run(q, (keys[:, None], values[:, None]), out=out)


class FlashInferPrompts(FlashInferAttention):
    """Attention of prompt chunks to themselves and to earlier tokens of their requests."""

    def __init__(self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan]) -> None:
        """slot_table: [R, positions], with the KV slots of the spans' tokens."""
        tables = [slot_table[span.slot, : span.start + span.length] for span in spans]
        new = [table[span.start :] for table, span in zip(tables, spans)]
        queries, keys = [len(part) for part in new], [len(table) for table in tables]
        super().__init__(pool, torch.cat(new), torch.cat(tables), queries, keys)
        self._without = lambda: CausalAttention(pool, slot_table, spans)
        self.instead: CausalAttention | None = None  # if there is no plan for these prompts

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.instead is not None:
            return self.instead.attend(layer, q, k, v)
        try:
            return super().attend(layer, q, k, v)
        except RuntimeError as error:
            if self.wrapper is not None:
                raise
            log.warning("attention of these prompts by torch, FlashInfer has no plan: %s", error)
            self.instead = self._without()
            return self.instead.attend(layer, q, k, v)


class FlashInferTrees(FlashInferAttention):
    """Attention of tree nodes to the tokens before the root and to their ancestors, if the host
    knows the sequence lengths. The mask covers the whole sequence."""

    def __init__(
        self,
        pool: KVPool,
        slot_table: Tensor,
        slots: Sequence[int],
        prefix: Sequence[int],
        kv_slots: Tensor,
        ancestors: Tensor,
    ) -> None:
        """slots, prefix: [b], on the host; other arguments as in ``TreeNodes``."""
        T = kv_slots.shape[1]
        read, masks = [], []
        for i, (slot, length) in enumerate(zip(slots, prefix)):
            read += [slot_table[slot, :length], kv_slots[i]]
            before = ancestors.new_ones(T, length)
            masks.append(torch.cat([before, ancestors[i]], dim=1).flatten())
        keys = [length + T for length in prefix]
        mask = torch.cat(masks) if T > 1 else None
        queries = [T] * len(keys)
        super().__init__(pool, kv_slots.reshape(-1), torch.cat(read), queries, keys, mask)
