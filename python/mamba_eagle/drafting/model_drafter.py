"""Drafting with a network: a head on the target's hidden states, or a model of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.drafting.base import Drafter, DraftParts, KeyedNoise
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.drafting.pending import UNTRACKED, pending_entries
from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.accept.cpu import append_pending
from mamba_eagle.kernels.top_log_probs import TopTokens, top_of
from mamba_eagle.layers.moe import experts_on_device
from mamba_eagle.message import PrefillItem
from mamba_eagle.runner.contexts import (
    PrefillPart,
    VerifyContext,
    prefill_context,
    prefill_parts,
    start_finished,
    tree_attention,
)
from mamba_eagle.runner.lanes import LaneRows, Lanes, lane_attention
from mamba_eagle.runner.pools import KVPool, StatePool
from mamba_eagle.runner.stateless_verify import StatelessVerify
from mamba_eagle.runner.transfer import to_device
from mamba_eagle.runner.verify import VERIFY_SCHEMES, DeferredVerify, SchemeSize, VerifyScheme
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree, candidates, chain_prefix, chain_tree

MAX_PENDING = 16  # entries of tokens that plain steps made; beyond that they are run
# In all, of a drafter that needs no row for each: so that plain decoding seldom stops for it. The
# slot table has room for 64 positions behind a request.
MAX_WITHOUT_ROWS = 62
FEW_PLAIN_STEPS = 2  # whose tokens a step of drafts takes in as well; after more it catches up
SPARE_ROWS = 8  # longer chains of the drafter's own state, fewer folds


def max_lanes(config: EngineConfig) -> int:
    """Lanes of a request that are run: those of the last step are only chosen."""
    shape = config.tree_shape
    return shape.topk * max(shape.depth - 1, 0)


def max_pending(config: EngineConfig) -> int:
    """Room for entries that wait: plain steps may fill it, and a step of drafts comes on top."""
    return MAX_PENDING + config.tree_shape.depth + 1


def max_without_rows(config: EngineConfig) -> int:
    """The same of a drafter without recurrent layers."""
    return max(max_pending(config), MAX_WITHOUT_ROWS)


def draft_rows(config: EngineConfig) -> int:
    """Rows of a request in a drafter with recurrent layers: pending entries, a chain as long, and
    lanes."""
    return 2 * max_pending(config) + max_lanes(config) + SPARE_ROWS


class ModelDrafter(Drafter):
    """EAGLE-2 trees (arXiv 2406.16858) from a DraftNetwork.

    An entry takes a token and what the target said one position before. Entries of tokens that
    were accepted wait as *pending*, the next root's among them (its KV slot comes only with the
    next plan), and are run all at once, as a chain, when the next tree is wanted (pending.py).

    Lanes are drafted from the root's output and leave nothing behind.
    """

    def __init__(self, network: DraftNetwork, parts: DraftParts) -> None:
        config, net = parts.config, network.config
        self.network, self.table = network, parts.table
        self.max_lanes = max_lanes(config)
        room = max_without_rows if net.mamba is None else max_pending
        self.max_pending = room(config)
        requests, device = parts.table.processed.shape[0], parts.device
        self.kv = KVPool(
            net.num_attention_layers,
            parts.kv_slots,
            net.attention,
            parts.dtype,
            device,
            num_spare=1 + requests * self.max_lanes,
        )
        self.pool = StatePool(
            net.num_mamba_layers,
            parts.state_slots,
            net.mamba,
            network.carry_size,
            getattr(torch, config.mamba_ssm_dtype),
            parts.dtype,
            device,
        )
        self.scheme: VerifyScheme = StatelessVerify(parts.table, self.pool)
        if net.mamba is not None:
            size = SchemeSize(
                layers=net.num_mamba_layers,
                features=network.carry_size,
                rows=draft_rows(config),
                nodes=self.max_pending,
                accepts=self.max_pending,
                spare=self.max_lanes,
            )
            self.scheme = VERIFY_SCHEMES["deferred"](net.mamba, size, parts.table, self.pool)

        # a step's entries are appended valid or not; hence the room behind ``max_pending``
        self.max_accepted = config.tree_shape.depth + 1
        width = self.max_pending + self.max_accepted
        self.waiting = [0] * requests  # entries of each request, or more: what the host knows
        # entries that a tree's requests run at most; the same in all steps that a graph repeats
        self.longest = min(self.max_accepted + FEW_PLAIN_STEPS, self.max_pending)
        self.device = device
        self.entries = pending_entries(
            parts.table, width, network.feature_size, parts.dtype, self.kv.padding_slot
        )
        self.carry = torch.zeros(requests, network.carry_size, dtype=parts.dtype, device=device)
        self.longest_chain = chain_tree(parts.table.processed.new_zeros(1, self.max_pending))
        attends = not net.num_attention_layers or gpu.usable(device, parts.dtype)
        on_device = self.scheme.on_device and attends
        self.on_device = on_device and experts_on_device(net.moe, parts.dtype)

    # ── what became of the sequence ──

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        parts = prefill_parts(items)
        firsts = to_device([part.first for part in parts], torch.int64, self.device)
        given = features.roll(1, dims=0)
        given[firsts] = before.to(given.dtype)
        entries = self.network.entry_features(given)
        # a chunk whose entries take a carry is a pass of its own
        for run in [parts] if not self.network.carry_size else [[part] for part in parts]:
            span = slice(run[0].first, run[-1].first + run[-1].length)
            mamba = self.network.config.mamba
            ctx = prefill_context(run, self.pool, self.kv, self.table.kv_slots, mamba)
            carry = self.pool.feature[run[0].item.state_slot][None]
            outputs = self.network.chain(tokens[None, span], entries[None, span], carry, ctx)[0]
            self._keep_carries(run, outputs[:, : self.network.carry_size])
        slots = to_device([item.slot for item in items], torch.int64, self.device)
        ends = [item.start + len(item.token_ids) for item in items]
        self.entries.processed[slots] = to_device(ends, torch.int64, self.device)
        self.entries.pending[slots] = 0
        start_finished(self.scheme, items, self.device)

    def _keep_carries(self, parts: Sequence[PrefillPart], carries: Tensor) -> None:
        """carries [n, C] of the parts' tokens."""
        if not self.network.carry_size:
            return
        for part in parts:
            item, own = part.item, carries[part.first - parts[0].first :]
            for save in item.saves:
                self.pool.feature[save.state_slot] = own[save.position - item.start - 1]
            self.pool.feature[item.state_slot] = self.carry[item.slot] = own[part.length - 1]

    def observe_first_tokens(self, slots: Sequence[int], tokens: Tensor, features: Tensor) -> None:
        rows = to_device(slots, torch.int64, self.device)
        waits = self.entries
        waits.tokens[rows, 0] = tokens
        entries = self.network.entry_features(features)
        waits.features[rows, 0] = entries.to(waits.features.dtype)
        waits.pending[rows] = 1
        for slot in slots:
            self.waiting[slot] = 1

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> list[int]:
        """Steps in flight may have added fewer entries than the host must reckon with."""
        tracked = [slot for slot in slots if self.waiting[slot] != UNTRACKED]
        waiting = dict(zip(tracked, self._waiting(tracked), strict=True))
        self.idle, added = not tracked and shape == PLAIN, shape.depth + 1
        if shape == PLAIN:
            behind = [slot for slot, n in waiting.items() if n + added > self.max_pending]
            waiting.update(dict.fromkeys(behind, 1))
            for slot, n in waiting.items():
                self.waiting[slot] = n + added
            return behind
        for slot in tracked:
            self.waiting[slot] = added
        if self.device.type == "cpu":
            self.longest = max([1, *waiting.values()])
            return []
        return [slot for slot, n in waiting.items() if n > self.longest]

    def catch_up(self, slots: Tensor) -> None:
        """All but the roots are run; these wait on, alone."""
        waits = self.entries
        counts = (waits.pending[slots] - 1).clamp(min=0)
        longest = max(int(counts.max()), 1) if self.device.type == "cpu" else self.max_pending
        self._run_pending(slots, counts, longest)
        waits.tokens[slots, 0] = waits.tokens[slots, counts]
        waits.features[slots, 0] = waits.features[slots, counts]
        waits.pending[slots] -= counts

    def untrack(self, slots: Sequence[int]) -> None:
        self.entries.pending[to_device(slots, torch.int64, self.device)] = UNTRACKED
        for slot in slots:
            self.waiting[slot] = UNTRACKED

    def _waiting(self, slots: Sequence[int]) -> list[int]:
        if self.device.type != "cpu" or not slots:
            return [self.waiting[slot] for slot in slots]
        rows = list(slots)  # what is known there costs nothing to look at
        return torch.where(self.table.remaining[rows] > 0, self.entries.pending[rows], 0).tolist()

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        """Accepted nodes join those that wait."""
        waits = self.entries
        if numba_math.usable(slots.device, waits.features.dtype):
            pending = (waits.tokens, waits.features, waits.pending)
            # of all nodes: in a plain step, where it matters, these are the accepted ones
            entries = self.network.entry_features(features.flatten(0, 1))
            entries = entries.unflatten(0, features.shape[:2])
            inputs = (slots, accepted.nodes, accepted.tokens, accepted.count, entries, *pending)
            append_pending(*(part.numpy() for part in inputs))
            return
        b, deep = accepted.nodes.shape
        entries = features.new_empty(b, deep, 0)
        if self.network.feature_size:
            index = accepted.nodes[..., None].expand(-1, -1, features.shape[2])
            made = self.network.entry_features(features.gather(1, index).flatten(0, 1))
            entries = made.view(b, deep, -1)
        waits.append(slots, accepted, entries)

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        kept = [
            (slot, position)
            for slot, position in zip(slots, positions)
            if position >= 0 and self.waiting[slot] != UNTRACKED
        ]
        if kept:
            rows, ends = to_device(list(zip(*kept)), torch.int64, self.device)
            # a stop string may have cut tokens that were run: then there is less to do, or a part
            # of the chain is left out
            missing = (ends - self.entries.processed[rows]).clamp(min=0)
            longest = self.max_pending
            if self.device.type == "cpu":
                longest = int(missing.max())
            if longest:
                self._run_pending(rows, missing, longest)
            if isinstance(self.scheme, DeferredVerify):
                keep = (
                    ends - (self.entries.processed[rows] - self.scheme.journal_len[rows])
                ).clamp(min=0)
                self.scheme.finish(rows, self.table.state_slot[rows], keep)
        self.entries.pending[to_device(slots, torch.int64, self.device)] = 0
        for slot in slots:
            self.waiting[slot] = 0

    # ── drafting ──

    def propose(self, slots: Tensor, shape: TreeShape, noise: KeyedNoise | None) -> Tree:
        table, network = self.table, self.network
        # a request that has ended takes nothing in: what is pending is settled when it leaves
        above = self._run_pending(slots, None, self.longest)[:, None]  # [b, lanes, O]: the root's
        root = table.processed[slots]  # its position
        grown = candidates(table.last_token[slots], shape.topk, shape.depth)
        frontier = grown.expand(self._best(0, above, root + 1, noise, shape.topk))
        if shape.depth > 1:
            lanes = self._lanes(slots, root + 1)
        for depth in range(1, shape.depth):
            index = frontier.lanes[..., None].expand(-1, -1, above.shape[2])
            above = network.lanes(
                depth,
                frontier.tokens.reshape(-1),
                above.gather(1, index).flatten(0, 1),
                lanes.context(frontier.lanes, root + depth),
            ).unflatten(0, frontier.tokens.shape)
            frontier = grown.expand(self._best(depth, above, root + depth + 1, noise, shape.topk))
        return grown.select(shape.nodes)

    def _best(
        self, depth: int, outputs: Tensor, positions: Tensor, noise: KeyedNoise | None, k: int
    ) -> TopTokens:
        """outputs [b, lanes, O], positions [b] of the tokens they predict -> [b, lanes, k]."""
        shape, outputs = outputs.shape[:2], outputs.flatten(0, 1)
        if noise is None:
            return self.network.best(depth, outputs, k).unflatten(shape)
        log_probs = self.network.log_probs(depth, outputs).unflatten(0, shape)
        return top_of(noise(log_probs, positions).flatten(0, 1), k).unflatten(shape)

    def _lanes(self, slots: Tensor, prefix: Tensor) -> Lanes:
        """Lanes behind the first ``prefix`` [b] tokens, the root among them."""
        rows = None
        if isinstance(self.scheme, DeferredVerify):
            rows = LaneRows(self.scheme, slots, self.max_lanes)
        attention = lane_attention(self.kv, self.table.kv_slots, slots, prefix, self.max_lanes)
        return Lanes(attention, rows, self.scheme)

    # ── entries of the sequence ──

    def _run_pending(self, slots: Tensor, counts: Tensor | None, longest: int) -> Tensor:
        """Run entries as ``PendingEntries.take`` gives them. Returns the output of the last,
        [b, O] (of a request with none: nothing of meaning)."""
        taken, prefix, own, positions = self.entries.take(slots, counts, longest)
        # a chain behind the prefix; what pads it stands at its end, where nobody looks
        chain = self._chain(taken.tokens)
        attention = tree_attention(
            self.kv, self.table.kv_slots, slots, prefix, own, chain.parents, chain.ancestors
        )
        self.scheme.begin(slots, chain)
        outputs = self.network.chain(
            taken.tokens,
            self.entries.features[slots, :longest],
            self.carry[slots],
            VerifyContext(self.scheme, attention, positions.reshape(-1)),
        )
        self.scheme.accept(taken, outputs[..., : self.network.carry_size])
        end = taken.nodes[:, -1:, None].expand(-1, -1, outputs.shape[2])
        last = outputs.gather(1, end)[:, 0]
        if self.network.carry_size:
            carry = last[:, : self.network.carry_size].to(self.carry.dtype)
            alive = taken.count[:, None] > 0
            self.carry[slots] = torch.where(alive, carry, self.carry[slots])
        return last

    def _chain(self, tokens: Tensor) -> Tree:
        if self.device.type == "cpu":
            return chain_tree(tokens)
        return chain_prefix(self.longest_chain, tokens)

    @property
    def num_bytes(self) -> int:
        own = (self.kv, self.pool, self.scheme, self.network)
        return sum(part.num_bytes for part in own)
