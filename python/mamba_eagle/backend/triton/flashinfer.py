"""Attention of prompts over the paged pool by FlashInfer (https://docs.flashinfer.ai).

FlashInfer plans each batch on the host, from the lengths of its sequences. The lengths of prompts
are in the plan that the runner executes. The lengths of running requests are known only to the
device while a step is in flight, so the Triton kernel handles trees and plain decoding.
"""

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


class FlashInferPrompts:
    """Attention of prompt chunks to themselves and to earlier tokens of their requests, planned at
    the first layer."""

    def __init__(self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan]) -> None:
        """slot_table: [R, positions], with the KV slots of the spans' tokens."""
        tables = [slot_table[span.slot, : span.start + span.length] for span in spans]
        new = [table[span.start :] for table, span in zip(tables, spans)]
        queries, keys = [len(part) for part in new], [len(table) for table in tables]
        ones = torch.ones(len(keys), dtype=torch.int32)  # tokens in each request's last page
        self.pool, self.write_slots = pool, torch.cat(new)
        self.pages = (_starts(queries), _starts(keys), torch.cat(tables).int(), ones)
        self.wrapper: BatchPrefillWithPagedKVCacheWrapper | None = None
        self._without = lambda: CausalAttention(pool, slot_table, spans)
        self.instead: CausalAttention | None = None  # if there is no plan for these prompts

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""
        if self.wrapper is None and self.instead is None:
            try:
                self.wrapper = self._planned(layer, q, k)
            except RuntimeError as error:
                log.warning("attention of prompts by torch, FlashInfer has no plan: %s", error)
                self.instead = self._without()
        if self.wrapper is None:
            assert self.instead is not None
            return self.instead.attend(layer, q, k, v)
        self.pool.write(layer.index, self.write_slots, k, v)
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self.wrapper.run(q.contiguous(), (keys[:, None], values[:, None]), out=out)

    def _planned(self, layer: AttentionView, q: Tensor, k: Tensor) -> Any:
        heads = (q.shape[1], k.shape[1], q.shape[2])
        return _wrappers(q.device, *heads).planned(
            *self.pages,
            *heads,
            1,  # page size
            causal=True,
            sm_scale=layer.scale,
            q_data_type=q.dtype,
            kv_data_type=self.pool.k.dtype,
        )
