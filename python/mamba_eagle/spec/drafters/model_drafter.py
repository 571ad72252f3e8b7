"""Drafting with a network: a head on the target's hidden states, or a model of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import TreeShape
from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.accept.cpu import append_pending
from mamba_eagle.message import PrefillItem
from mamba_eagle.runner.contexts import (
    PrefillPart,
    VerifyContext,
    prefill_context,
    tree_attention,
)
from mamba_eagle.runner.lanes import LaneRows, Lanes, lane_attention
from mamba_eagle.runner.pools import CheckpointPool, KVPool
from mamba_eagle.runner.stateless_verify import StatelessVerify
from mamba_eagle.runner.verify import VERIFY_SCHEMES, DeferredVerify, SchemeSize, VerifyScheme
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.drafters.base import Drafter, DraftParts, KeyedNoise
from mamba_eagle.spec.drafters.network import DraftNetwork
from mamba_eagle.spec.tree import Tree, candidates, chain_tree

MOST_PENDING = 16  # entries of tokens that plain steps made; beyond that they are run
SPARE_ROWS = 8  # longer chains of the drafter's own state, fewer folds


def max_lanes(config: EngineConfig) -> int:
    """Lanes of a request that are run: those of the last step are only chosen."""
    shape = config.tree_shape
    return shape.topk * max(shape.steps - 1, 0)


def most_pending(config: EngineConfig) -> int:
    """Room for entries that wait: plain steps may fill it, and a step of drafts comes on top."""
    return MOST_PENDING + config.tree_shape.steps + 1


def draft_rows(config: EngineConfig) -> int:
    """Rows of a request in a drafter with recurrent layers: pending entries, a chain as long, and
    lanes."""
    return 2 * most_pending(config) + max_lanes(config) + SPARE_ROWS


class ModelDrafter(Drafter):
    """EAGLE-2 trees (arXiv 2406.16858) from a DraftNetwork.

    An entry takes a token and what the target said one position before. Entries of tokens that
    were accepted wait as *pending*, the next root's among them (its KV slot comes only with the
    next plan), and are run all at once, as a chain, when the next tree is wanted:

        entries   0 ─────────── run ─────────────── run + pending
                  in the caches     wait; the last is the root

    Lanes are drafted from the root's output and leave nothing behind.
    """

    def __init__(self, network: DraftNetwork, parts: DraftParts) -> None:
        config, net = parts.config, network.config
        self.network, self.table = network, parts.table
        self.max_lanes, self.most_pending = max_lanes(config), most_pending(config)
        requests, device = parts.table.run.shape[0], parts.device
        self.kv = KVPool(
            net.num_attention_layers,
            parts.kv_slots,
            net.attention,
            parts.dtype,
            device,
            num_spare=1 + requests * self.max_lanes,
        )
        self.pool = CheckpointPool(
            net.num_mamba_layers,
            parts.checkpoints,
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
                nodes=self.most_pending,
                accepts=self.most_pending,
                spare=self.max_lanes,
            )
            self.scheme = VERIFY_SCHEMES["deferred"](net.mamba, size, parts.table, self.pool)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=parts.dtype, device=device)

        # a step's entries are appended valid or not; hence the room behind ``most_pending``
        width = self.most_pending + config.tree_shape.steps + 1
        self.run = integers(requests)  # entries in the caches
        self.pending_tokens = integers(requests, width)
        self.pending_features = floats(requests, width, network.feature_size)
        self.pending = integers(requests)
        self.carry = floats(requests, network.carry_size)

    # ── what became of the sequence ──

    def observe_prefill(
        self, item: PrefillItem, tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        slot, length = item.slot, len(item.token_ids)
        if item.is_first:
            if item.load_from < 0:
                self.pool.clear(item.checkpoint)
            else:
                self.pool.copy(item.load_from, item.checkpoint)
        part = PrefillPart(item, 0, length)
        mamba = self.network.config.mamba
        ctx = prefill_context([part], self.pool, self.kv, self.table.kv_slots, mamba)
        given = torch.cat([before[None].to(features.dtype), features[:-1]])
        outputs = self.network.chain(
            tokens[None],
            self.network.entry_features(given)[None],
            self.pool.feature[item.checkpoint][None],
            ctx,
        )[0]
        carries = outputs[:, : self.network.carry_size]
        for save in item.saves:
            self.pool.feature[save.checkpoint] = carries[save.position - item.start - 1]
        self.pool.feature[item.checkpoint] = self.carry[slot] = carries[-1]
        self.run[slot] = item.start + length
        self.pending[slot] = 0
        if item.is_last:
            self.scheme.start(slot, item.checkpoint)

    def observe_first_token(self, slot: int, token: Tensor, feature: Tensor) -> None:
        self.pending_tokens[slot, 0] = token
        entry = self.network.entry_features(feature[None])[0]
        self.pending_features[slot, 0] = entry.to(self.pending_features.dtype)
        self.pending[slot] = 1

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        deep = accepted.nodes.shape[1]
        if self._append(slots, accepted, features) > self.most_pending - deep:
            self._run_all_but_roots(slots[self.pending[slots] > self.most_pending - deep])

    def _append(self, slots: Tensor, accepted: Truncated, features: Tensor) -> int:
        """Accepted nodes join those that wait. Returns the largest number of a request's."""
        pending = (self.pending_tokens, self.pending_features, self.pending)
        if numba_math.usable(slots.device, self.pending_features.dtype):
            # of all nodes: in a plain step, where it matters, these are the accepted ones
            entries = self.network.entry_features(features.flatten(0, 1))
            entries = entries.unflatten(0, features.shape[:2])
            inputs = (slots, accepted.nodes, accepted.tokens, accepted.count, entries, *pending)
            return int(append_pending(*(part.numpy() for part in inputs)))
        b, deep = accepted.nodes.shape
        index = accepted.nodes[..., None].expand(-1, -1, features.shape[2])
        entries = self.network.entry_features(features.gather(1, index).flatten(0, 1))
        columns = self.pending[slots][:, None] + torch.arange(deep, device=slots.device)
        at = (slots[:, None], columns)
        self.pending_tokens[at] = accepted.tokens
        self.pending_features[at] = entries.view(b, deep, -1).to(self.pending_features.dtype)
        self.pending[slots] += accepted.count
        return int(self.pending[slots].max())

    def release(self, slot: int, position: int) -> None:
        if position >= 0:
            slots = torch.tensor([slot], device=self.run.device)
            # a stop string may have cut tokens that were run: then there is less to do, or a part
            # of the chain is left out
            missing = position - int(self.run[slot])
            if missing > 0:
                self._run_pending(slots, torch.full_like(slots, missing))
            if isinstance(self.scheme, DeferredVerify):
                chain = int(self.scheme.chain_len[slot])
                keep = max(0, position - (int(self.run[slot]) - chain))
                self.scheme.finish(slot, int(self.table.checkpoint[slot]), keep)
        self.pending[slot] = 0

    # ── drafting ──

    def propose(self, slots: Tensor, shape: TreeShape, noise: KeyedNoise | None) -> Tree:
        table, network = self.table, self.network
        # a request that has ended takes nothing in: what is pending is settled when it leaves
        counts = torch.where(table.remaining[slots] > 0, self.pending[slots], 0)
        above = self._run_pending(slots, counts)[:, None]  # [b, lanes, O], the root's at first
        self.pending[slots] -= counts
        root = table.run[slots]  # its position
        grown = candidates(table.last_token[slots], shape.topk)
        frontier = grown.expand(self._scores(0, above, root + 1, noise))
        if shape.steps > 1:
            lanes = self._lanes(slots, root + 1)
        for depth in range(1, shape.steps):
            index = frontier.lanes[..., None].expand(-1, -1, above.shape[2])
            above = network.lanes(
                depth,
                frontier.tokens.reshape(-1),
                above.gather(1, index).flatten(0, 1),
                lanes.context(frontier.lanes, root + depth),
            ).unflatten(0, frontier.tokens.shape)
            frontier = grown.expand(self._scores(depth, above, root + depth + 1, noise))
        return grown.select(shape.nodes)

    def _scores(
        self, depth: int, outputs: Tensor, positions: Tensor, noise: KeyedNoise | None
    ) -> Tensor:
        """outputs [b, lanes, O], positions [b] of the tokens they predict -> [b, lanes, V]."""
        log_probs = self.network.log_probs(depth, outputs.flatten(0, 1))
        log_probs = log_probs.unflatten(0, outputs.shape[:2])
        return log_probs if noise is None else noise(log_probs, positions)

    def _lanes(self, slots: Tensor, prefix: Tensor) -> Lanes:
        """Lanes behind the first ``prefix`` [b] tokens, the root among them."""
        rows = None
        if isinstance(self.scheme, DeferredVerify):
            rows = LaneRows(self.scheme, slots, self.max_lanes)
        attention = lane_attention(self.kv, self.table.kv_slots, slots, prefix, self.max_lanes)
        return Lanes(attention, rows, self.scheme)

    # ── entries of the sequence ──

    def _run_pending(self, slots: Tensor, counts: Tensor) -> Tensor:
        """Run the first ``counts`` [b] pending entries. Returns the output of the last, [b, O]
        (of a request with none: nothing of meaning)."""
        longest = max(int(counts.max()), 1)
        offsets = torch.arange(longest, device=slots.device)
        prefix = self.run[slots]
        write = self.table.kv_slots[slots[:, None], prefix[:, None] + offsets]  # [b, E]
        write = torch.where(offsets < counts[:, None], write, self.kv.bin_slot)
        # a chain behind the prefix; what pads it stands at its end, where nobody looks
        tokens = self.pending_tokens[slots, :longest]
        chain = chain_tree(tokens)
        attention = tree_attention(
            self.kv, self.table.kv_slots, slots, prefix, write, chain.parents, chain.ancestors
        )
        self.scheme.begin(slots, chain)
        positions = (prefix[:, None] + offsets).reshape(-1)
        outputs = self.network.chain(
            tokens,
            self.pending_features[slots, :longest],
            self.carry[slots],
            VerifyContext(self.scheme, attention, positions),
        )
        nodes = torch.minimum(offsets, (counts - 1).clamp(min=0)[:, None])
        taken = Truncated(nodes, tokens, counts, counts == 0)
        self.scheme.accept(taken, outputs[..., : self.network.carry_size])
        self.run[slots] += counts
        last = outputs.gather(1, nodes[:, -1:, None].expand(-1, -1, outputs.shape[2]))[:, 0]
        if self.network.carry_size:
            carry = last[:, : self.network.carry_size].to(self.carry.dtype)
            self.carry[slots] = torch.where(counts[:, None] > 0, carry, self.carry[slots])
        return last

    def _run_all_but_roots(self, slots: Tensor) -> None:
        """Plain steps have filled the room: the root waits on, alone."""
        counts = self.pending[slots] - 1
        self._run_pending(slots, counts)
        self.pending_tokens[slots, 0] = self.pending_tokens[slots, counts]
        self.pending_features[slots, 0] = self.pending_features[slots, counts]
        self.pending[slots] = 1

    @property
    def num_bytes(self) -> int:
        own = (self.kv, self.pool, self.scheme, self.network)
        return sum(part.num_bytes for part in own)
