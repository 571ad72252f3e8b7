"""DFLASH: a few attention layers draft a whole block in one pass."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mamba_eagle.backend.attention import BlockRows
from mamba_eagle.backend.contexts import BlockContext
from mamba_eagle.backend.prefill import positions_of, prefill_parts
from mamba_eagle.config import EngineConfig
from mamba_eagle.drafting import base
from mamba_eagle.drafting.block_trees import Block, BlockTrees, MarginalTrees
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.drafting.waiting import QueueingDrafter, max_without_rows
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.message import PrefillItem
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.dflash import BlockDraftModel, published_name
from mamba_eagle.models.dflash_config import block_config
from mamba_eagle.models.loader import stored_tensors
from mamba_eagle.tree.tree import Tree


class BlockDrafter(QueueingDrafter):
    """A pass over [anchor, mask, mask, …] gives one hidden state per row, and ``trees`` makes a
    token tree of them.

    The context consists of keys and values of the tokens that the target has processed. An entry is
    the target's tapped hidden states of a token. Entries of prompts are processed at once, those of
    accepted tokens stay *pending* until the next tree is needed:

        position   0 ────────────────── processed - 1   processed    …  + 1   …  + 2
        row                     └ pending entries ┘     0: anchor    1: mask  2: mask
        keys       the pool, at the target's KV slots   spare KV slots, overwritten by the next
                                                        block
    """

    def __init__(self, model: BlockDraftModel, trees: BlockTrees, parts: base.DraftParts) -> None:
        config, backend = parts.config, parts.backend
        self.model, self.trees = model, trees
        self.embedding = parts.target.parts.embedding
        self.first_tap = parts.target.config.hidden_size
        requests = parts.table.processed.shape[0]
        rows = model.block.num_rows(config.tree_shape.depth)
        kv = base.draft_kv(model.config, parts, requests * rows)
        taps = len(model.block.taps) * model.block.target_hidden_size
        super().__init__(parts, kv, max_without_rows(config), taps)
        spare = torch.arange(requests * rows, device=backend.device)
        self.spare = (spare + kv.padding_slot + 1).view(requests, rows)
        self.on_device = backend.attention_on_device

    # ── following the sequences ──

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        parts = prefill_parts(items)
        spans = [part.span for part in parts]
        ends = [span.start + span.length for span in spans]
        positions = self.place.to_device(positions_of(parts))
        slots = [self.table.kv_slots[span.slot, span.start : end] for span, end in zip(spans, ends)]
        self._write(features[:, self.first_tap :], positions, torch.cat(slots))
        self.begin_prompts([item.slot for item in items], ends)

    def entry_features(self, features: Tensor) -> Tensor:
        return features[:, self.first_tap :]

    # ── entries of the context ──

    def run_pending(self, slots: Tensor, counts: Tensor | None, longest: int) -> None:
        """Process the entries that ``PendingEntries.take`` returns for these arguments."""
        taken = self.entries.take(slots, counts, longest)
        taps = self.entries.features[slots, :longest].flatten(0, 1)
        self._write(taps, taken.positions.reshape(-1), taken.kv_slots.reshape(-1))

    def _write(self, taps: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Enter tokens into the context: taps [n, …], positions and kv_slots [n]."""
        k, v = self.model.context_kv(self.model.context(taps), positions)
        self.kv.write_layers(kv_slots, k, v)

    # ── drafting ──

    def propose(self, slots: Tensor, part: base.StepPart, noise: base.KeyedNoise | None) -> Tree:
        table, shape, block = self.table, part.shape, self.model.block
        # entries of a request that has ended stay pending until it is released
        self.run_pending(slots, None, part.longest)
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
        return self.kv.num_bytes + weight_bytes(self.model)


class DFlashSource(base.FolderSource):
    must_equal = ("vocab_size",)
    reader = "dflash_config"
    trees: type[BlockTrees] = MarginalTrees

    def __init__(self, config: EngineConfig, target: ModelConfig) -> None:
        super().__init__(config, target)
        self.shape = config.tree_shape
        self.block = block_config(self.own)
        self.tap_layers = self.block.taps

    @property
    def made_for(self) -> int:
        return self.block.target_hidden_size

    def problems(self) -> list[str]:
        wrong, block, shape = super().problems(), self.block, self.shape
        if shape.depth > block.max_drafts:
            wrong.append(
                f"--speculative-num-steps {shape.depth}: drafter {self.path} drafts "
                f"{block.max_drafts} tokens in a row at most (block_size {block.rows}); set it to "
                f"{block.max_drafts} at most"
            )
        layers, taps = len(self.target.blocks), self.tap_layers
        if sorted(set(taps)) != list(taps) or taps[0] < 0 or taps[-1] > layers:
            wrong.append(
                f"drafter {self.path} reads the outputs of layers {[tap - 1 for tap in taps]} of a "
                f"target with {layers} layers: set target_layer_ids in config.json to increasing "
                f"numbers between 0 and {layers - 1}"
            )
        return wrong

    @property
    def vocabulary(self) -> int:
        return self.block.draft_vocab_size

    def module(self, config: ModelConfig | None = None) -> BlockDraftModel:
        names = None
        if self.has_files:
            names = {published_name(name) for name in stored_tensors(Path(self.path))}
        return BlockDraftModel(config or self.own, names)

    def make(self, parts: base.DraftParts) -> base.Drafter:
        model: BlockDraftModel = self.load(parts)
        model.check_tokens(self.path)
        vocabulary = DraftVocabulary(parts.backend, self.columns(parts), model.target_ids())
        trees = self.trees(model, parts.target.lm_head, vocabulary)
        return BlockDrafter(model, trees, parts)
