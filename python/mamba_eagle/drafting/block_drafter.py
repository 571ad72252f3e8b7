"""Drafting a whole block in one pass over a few attention layers (models/dflash.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import BlockRows
from mamba_eagle.backend.contexts import BlockContext
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.prefill import prefill_parts
from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.base import Drafter, DraftParts, KeyedNoise, StepPart
from mamba_eagle.drafting.block_trees import Block, BlockTrees
from mamba_eagle.message import PrefillItem
from mamba_eagle.models.dflash import BlockDraftModel
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class BlockDrafter(Drafter):
    """A pass over [anchor, mask, mask, …] gives one hidden state per row, and ``trees`` makes a
    token tree of them.

    The context consists of keys and values of the tokens that the target has processed. They depend
    on the target's hidden states alone, so they are computed as soon as these are known, in
    prefill and after every decode step, and there is never anything to catch up on:

        position   0 ──────────── processed - 1   processed    …  + 1   …  + 2
        row                                       0: anchor    1: mask  2: mask
        keys       the pool, at the target's      spare KV slots, overwritten by the next block
                   KV slots
    """

    def __init__(self, model: BlockDraftModel, trees: BlockTrees, parts: DraftParts) -> None:
        config, net, backend = parts.config, model.config, parts.backend
        self.model, self.trees = model, trees
        self.table, self.backend, self.place = parts.table, backend, backend.place
        self.embedding = parts.target.parts.embedding
        self.first_tap = parts.target.config.hidden_size
        requests = parts.table.processed.shape[0]
        self.rows = model.block.num_rows(config.tree_shape.depth)
        self.kv = KVPool(
            net.num_attention_layers,
            parts.kv_slots,
            net.attention,
            backend.dtype,
            backend.device,
            num_spare=1 + requests * self.rows,
        )
        spare = torch.arange(requests * self.rows, device=backend.device)
        self.spare = (spare + self.kv.padding_slot + 1).view(requests, self.rows)
        self.tracked = [False] * requests  # by request slot
        self.on_device = backend.attention_on_device

    # ── following the sequences ──

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        spans = [part.span for part in prefill_parts(items)]
        ends = [span.start + span.length for span in spans]
        positions = [torch.arange(span.start, end) for span, end in zip(spans, ends)]
        slots = [self.table.kv_slots[span.slot, span.start : end] for span, end in zip(spans, ends)]
        self._write(features, torch.cat(positions), torch.cat(slots))
        for item in items:
            self.tracked[item.slot] = True

    def observe_first_tokens(
        self, slots: Sequence[int], tokens: Tensor, features: Tensor
    ) -> None: ...

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        return StepPart(shape, idle=not any(self.tracked[slot] for slot in slots))

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        count = accepted.count[:, None]
        offsets = torch.arange(accepted.nodes.shape[1], device=slots.device)
        positions = (self.table.processed[slots][:, None] - count).clamp(min=0) + offsets
        kv_slots = self.table.kv_slots[slots[:, None], positions]
        kv_slots = torch.where(offsets < count, kv_slots, self.kv.padding_slot)
        index = accepted.nodes[..., None].expand(-1, -1, features.shape[2])
        kept = features.gather(1, index).flatten(0, 1)
        self._write(kept, positions.reshape(-1), kv_slots.reshape(-1))

    def _write(self, features: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Enter tokens into the context: features [n, F] of the target, positions and kv_slots
        [n]."""
        context = self.model.context(features[:, self.first_tap :])
        k, v = self.model.context_kv(context, positions)
        self.kv.k.index_copy_(1, kv_slots, k.to(self.kv.k.dtype))
        self.kv.v.index_copy_(1, kv_slots, v.to(self.kv.v.dtype))

    def untrack(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.tracked[slot] = False

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        self.untrack(slots)

    # ── drafting ──

    def propose(self, slots: Tensor, part: StepPart, noise: KeyedNoise | None) -> Tree:
        table, shape, block = self.table, part.shape, self.model.block
        b, rows = len(slots), block.num_rows(shape.depth)
        anchors, prefix = table.last_token[slots], table.processed[slots]
        tokens = anchors.new_full((b, rows), block.mask_token)
        tokens[:, 0] = anchors
        own = self.spare[:b, :rows]
        attention = self.backend.block_attention(
            self.kv, BlockRows(table.kv_slots, slots, prefix, own)
        )
        positions = prefix[:, None] + torch.arange(rows, device=slots.device)
        context = BlockContext(attention, positions.reshape(-1))
        hidden = self.model(self.model.embed(tokens, self.embedding), context)
        first = 0 if block.sample_from_anchor else 1
        predicting = hidden.view(b, rows, -1)[:, first : first + shape.depth]
        grown = self.backend.candidates(anchors, shape.topk, shape.depth)
        self.trees.grow(grown, Block(predicting, anchors, prefix + 1), noise)
        return grown.select(shape.nodes)

    @property
    def num_bytes(self) -> int:
        return self.kv.num_bytes + sum(p.nbytes for p in self.model.parameters())
