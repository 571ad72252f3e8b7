"""Drafting with a network: a head on the target's hidden states, or a smaller model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import TreeNodes
from mamba_eagle.backend.contexts import VerifyContext
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillPart, prefill_parts, start_finished
from mamba_eagle.backend.programs import DraftPools, GreedyDrafting
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.config import DraftSettings
from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.base import DraftParts, KeyedNoise, StepPart, draft_kv
from mamba_eagle.drafting.growth import Growth
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.drafting.waiting import QueueingDrafter, max_pending, max_without_rows
from mamba_eagle.message import PrefillItem
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.tree.tree import Tree, chain_prefix, chain_tree, empty_trees

SPARE_ROWS = 8  # rows that make the journals of the drafter's own state longer, and folds rarer


def max_lanes(config: DraftSettings) -> int:
    """Lanes per request that pass through the network, which those of the last depth do not."""
    shape = config.tree_shape
    return shape.topk * max(shape.depth - 1, 0)


def draft_rows(config: DraftSettings) -> int:
    """Rows per request for a drafter with recurrent layers: pending entries, a journal of the same
    length, and lanes."""
    return 2 * max_pending(config) + max_lanes(config) + SPARE_ROWS


def bare_roots(tokens: Tensor, shape: TreeShape) -> Tree:
    """Trees of which only the roots are known: tokens [b] int64."""
    trees = empty_trees(len(tokens), shape.nodes, tokens.device)
    trees.tokens[:, 0] = tokens
    return trees


class ModelDrafter(QueueingDrafter):
    """EAGLE-2 trees (arXiv 2406.16858) from a DraftNetwork.

    An entry consists of a token and the target's feature of the previous position. Entries of
    accepted tokens, including the next root (whose KV slot comes with the next plan), stay
    *pending* until the next tree is needed. Then all of them are processed at once, as a chain.

    Lanes are drafted from the root's output; their keys, values and states are not kept.
    """

    left_waiting = 1  # the root
    pool: StatePool

    def __init__(self, network: DraftNetwork, columns: Columns, parts: DraftParts) -> None:
        """columns: of the network's logits, which this rank has."""
        config, net, backend = parts.config, network.config, parts.backend
        requests, self.max_lanes = parts.table.processed.shape[0], max_lanes(config)
        most = (max_without_rows if net.recurrence is None else max_pending)(config)
        kv = draft_kv(net, parts, requests * self.max_lanes)
        super().__init__(parts, kv, most, network.feature_size)
        self.network = network
        self.vocabulary = DraftVocabulary(backend, columns, network.target_ids())
        layers, carry = net.num_recurrent_layers, network.carry_size
        dtype = getattr(torch, config.mamba_ssm_dtype)
        rounding = backend.state_rounding(config.mamba_ssm_rounding, dtype, parts.table)
        sizes = (layers, parts.state_slots, net.recurrence, carry)  # in the target's state slots
        self.pool = StatePool(*sizes, rounding, backend.dtype, backend.device)
        size = SchemeSize(layers, carry, draft_rows(config), most, most, self.max_lanes)
        self.scheme = backend.state_scheme("deferred", net.recurrence, size, parts.table, self.pool)
        self.carry = self.pool.feature.new_zeros(requests, carry)
        self.longest_chain = chain_tree(parts.table.processed.new_zeros(1, self.max_pending))
        attends = not net.num_attention_layers or backend.attention_on_device
        on_device = self.scheme.on_device and attends
        self.recurrent = net.recurrence is not None or carry > 0
        self.reads = "features" if network.feature_size else "tokens"
        self.on_device = on_device and backend.experts_on_device(net.moe)
        self.growth = Growth(network, self.vocabulary, parts, self.scheme, self.kv, self.max_lanes)
        # Chains may end early only on one rank without graphs: others need not know the node count.
        if backend.place.on_host and config.num_ranks == 1:
            self.growth.min_probability[0] = config.speculative_draft_p_min
        self.greedy = self._greedy_drafting(config.tree_shape)

    # ── following the sequences ──

    def observe_prefill(
        self, items: Sequence[PrefillItem], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        parts = prefill_parts(items)
        firsts = self.place.to_device([part.first for part in parts])
        previous = features.roll(1, dims=0)
        previous[firsts] = before.to(previous.dtype)
        entries = self.network.entry_features(previous)
        recurrence, kv_slots = self.network.config.recurrence, self.table.kv_slots
        # chunks whose entries need a carry are processed one by one
        for group in [parts] if not self.network.carry_size else [[part] for part in parts]:
            span = slice(group[0].first, group[-1].first + group[-1].length)
            # the context's tokens begin at 0, whatever the group's place in the batch
            own = prefill_parts([part.item for part in group])
            ctx = self.backend.prefill_context(own, self.pool, self.kv, kv_slots, recurrence)
            carry = self.pool.feature[group[0].item.state_slot][None]
            inputs = (tokens[None, span], entries[None, span], carry)
            outputs = self.network.run_entries(*inputs, ctx)[0]
            self._keep_carries(group, outputs[:, : self.network.carry_size])
        ends = [item.start + len(item.token_ids) for item in items]
        self.begin_prompts([item.slot for item in items], ends)
        start_finished(self.scheme, items, self.place)

    def _keep_carries(self, parts: Sequence[PrefillPart], carries: Tensor) -> None:
        """Store the carries after which states are kept. carries: [n, C], of the parts' tokens."""
        if not self.network.carry_size:
            return
        for part in parts:
            item, own = part.item, carries[part.first - parts[0].first :]
            for save in item.saves:
                self.pool.feature[save.state_slot] = own[save.position - item.start - 1]
            self.pool.feature[item.state_slot] = self.carry[item.slot] = own[part.length - 1]

    def observe_first_tokens(self, slots: Sequence[int], tokens: Tensor, features: Tensor) -> None:
        device_slots, queue = self.place.to_device(slots), self.entries
        queue.tokens[device_slots, 0] = tokens
        entries = self.network.entry_features(features)
        queue.features[device_slots, 0] = entries.to(queue.features.dtype)
        queue.pending.index_fill_(0, device_slots, 1)
        self.set_bounds(slots, 1)

    def entry_features(self, features: Tensor) -> Tensor:
        return self.network.entry_features(features)

    def keep(self, slots: Tensor, ends: Tensor) -> None:
        if self.scheme.has_journal:
            folded = self.entries.processed[slots] - self.scheme.journal_len(slots)
            keep = (ends - folded).clamp(min=0)
            self.scheme.finish(slots, self.table.state_slot[slots], keep)

    # ── drafting ──

    def _greedy_drafting(self, largest: TreeShape) -> GreedyDrafting | None:
        """None: ``grow`` does it."""
        head = self.network.parts()
        if head is None or self.recurrent or self.vocabulary.is_split:
            return None
        least = self.growth.min_probability
        pools = DraftPools(self.table, self.entries, self.kv, self.max_lanes, largest, least)
        return self.backend.greedy_drafting(head, pools, self.scheme)

    def draft_whole_trees(self) -> None:
        self.growth.min_probability[0] = 0.0

    def propose(self, slots: Tensor, part: StepPart, noise: KeyedNoise | None) -> Tree:
        if noise is None and self.greedy is not None:
            return self.greedy(slots, part.shape, part.longest)
        return self.grow(slots, part.shape, part.longest, noise)

    def grow(self, slots: Tensor, shape: TreeShape, longest: int, noise: KeyedNoise | None) -> Tree:
        """As ``GreedyDrafting``, for all requests."""
        fixed = () if noise is None else noise.fixed(shape.depth)
        if len(fixed) == len(slots) and longest + self.max_accepted <= self.max_pending:
            # what needs the network processes the entries
            return bare_roots(self.table.last_token[slots], shape)
        # entries of a request that has ended stay pending until it is released
        roots = self.run_pending(slots, None, longest)[:, None]  # [b, 1, O]
        if noise is None or not fixed:
            return self.growth.grow(slots, roots, shape, noise)
        trees = bare_roots(self.table.last_token[slots], shape)
        asked = [i for i in range(len(slots)) if i not in fixed]
        if asked:
            index = self.place.to_device(asked)
            own = self.growth.grow(slots[index], roots[index], shape, noise.of(asked))
            for all_trees, drafted in zip(trees, own):
                all_trees[index] = drafted
        return trees

    # ── entries of the sequence ──

    def run_pending(self, slots: Tensor, counts: Tensor | None, longest: int) -> Tensor:
        """Process the entries that ``PendingEntries.take`` returns for these arguments.

        Returns the output of each request's last entry, [b, O]; arbitrary if it has none.
        """
        taken, prefix, own, positions = self.entries.take(slots, counts, longest)
        # a chain that follows the prefix, padded at its end, where no entry attends to it
        chain = self._chain(taken.tokens)
        layout = self.scheme.begin(slots, chain)
        nodes = TreeNodes(self.table.kv_slots, slots, prefix, own, chain.parents, chain.ancestors)
        attention = self.backend.tree_attention(self.kv, nodes)
        outputs = self.network.run_entries(
            taken.tokens,
            self.entries.features[slots, :longest],
            self.carry[slots],
            VerifyContext(self.scheme, layout, attention, positions.reshape(-1)),
        )
        self.scheme.accept(layout, taken, outputs[..., : self.network.carry_size])
        end = taken.nodes[:, -1:, None].expand(-1, -1, outputs.shape[2])
        last = outputs.gather(1, end)[:, 0]
        if self.network.carry_size:
            carry = last[:, : self.network.carry_size].to(self.carry.dtype)
            alive = taken.count[:, None] > 0
            self.carry[slots] = torch.where(alive, carry, self.carry[slots])
        return last

    def _chain(self, tokens: Tensor) -> Tree:
        """tokens [b, E] -> a chain each, on a GPU without launching a kernel."""
        if self.place.on_host:
            return chain_tree(tokens)
        return chain_prefix(self.longest_chain, tokens)

    @property
    def num_bytes(self) -> int:
        own = (self.kv, self.pool, self.scheme, self.network)
        return sum(part.num_bytes for part in own)
