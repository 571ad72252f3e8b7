"""EAGLE: a small head guesses the target's next hidden states and drafts a tree from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.core import TreeShape
from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.tree_attention.naive import masked_attention
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.rotary import Rotation
from mamba_eagle.message import PrefillItem
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.runner.contexts import (
    FusedTreeAttention,
    PagedAttention,
    causal_attention,
    tree_attention,
)
from mamba_eagle.runner.pools import KVPool, RequestTable
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.drafters.base import Drafter
from mamba_eagle.spec.tree import Tree, candidates


class AttentionOnly:
    """The context of a head whose only sequence layers are attention, without RoPE."""

    rotation: Rotation | None = None

    def __init__(self, paged: PagedAttention | FusedTreeAttention | LaneAttention) -> None:
        self.paged = paged

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.paged.attend(layer, q, k, v)

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        raise AssertionError("heads with Mamba2 layers are refused when they are loaded")

    @property
    def positions(self) -> Tensor:
        raise AssertionError("heads have no position encoding")


class LaneAttention:
    """Drafted lanes: they see the request's tokens, the root included, and their own ancestors.

    The lanes' keys and values live here, not in the pool: most of them are never accepted, and
    those that are get new entries from the target's true hidden states.
    """

    def __init__(
        self, pool: KVPool, layers: int, read_slots: Tensor, prefix_bias: Tensor, topk: int
    ) -> None:
        """read_slots [b, S]; prefix_bias [b, S], 0 or -inf."""
        self.topk = topk
        self.prefix_bias = prefix_bias[:, None].expand(-1, topk, -1)
        self.kv = [pool.read(layer, read_slots) for layer in range(layers)]
        self.lanes_seen: Tensor | None = None  # [b, topk, steps * topk] bool

    def advance(self, lanes: Tensor) -> None:
        """The next step's lanes continue ``lanes`` [b, topk] of the last one."""
        own = torch.eye(self.topk, dtype=torch.bool, device=lanes.device)
        own = own.expand(lanes.shape[0], -1, -1)
        if self.lanes_seen is not None:
            index = lanes[..., None].expand(-1, -1, self.lanes_seen.shape[2])
            own = torch.cat([self.lanes_seen.gather(1, index), own], dim=2)
        self.lanes_seen = own
        bias = torch.zeros_like(own, dtype=torch.float32).masked_fill_(~own, float("-inf"))
        self.mask_bias = torch.cat([self.prefix_bias, bias], dim=2)

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*topk, heads, D]; k, v [b*topk, kv_heads, D] -> [b*topk, heads, D]."""
        shape = self.mask_bias.shape[:2]
        keys, values = (
            torch.cat([seen, new.unflatten(0, shape).to(seen.dtype)], dim=1)
            for seen, new in zip(self.kv[layer.index], (k, v), strict=True)
        )
        self.kv[layer.index] = (keys, values)
        q = q.unflatten(0, shape)
        out = masked_attention(q, keys, values, self.mask_bias.to(q.dtype), layer.scale)
        return out.flatten(0, 1)


class FusedLaneAttention(FusedTreeAttention):
    """LaneAttention on a CPU: the lanes of a request are a forest behind its prefix, with keys and
    values in spare slots of the pool."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> None:
        """max_lanes: how many each request has room for, in all steps."""
        b = len(slots)
        nothing = torch.empty(b, 0, dtype=torch.int64)
        super().__init__(pool, slot_table, slots, prefix, nothing, nothing)
        spare = pool.bin_slot + 1 + np.arange(b * max_lanes)
        self.spare = spare.reshape(b, max_lanes)

    def advance(self, lanes: Tensor) -> None:
        """The next step's lanes continue ``lanes`` [b, topk] of the last one."""
        table, slots, prefix, _, parents = self.indices
        first, topk = parents.shape[1], lanes.shape[1]
        own = np.ascontiguousarray(self.spare[:, : first + topk])
        # the first lanes are roots: each is its own parent
        above = lanes.numpy() + first - topk if first else np.tile(np.arange(topk), (len(slots), 1))
        parents = np.concatenate([parents, above], axis=1)
        self.indices = (table, slots, prefix, own, parents)


class EagleDrafter(Drafter):
    """EAGLE-2 trees (arXiv 2406.16858) from a head of one or a few attention layers.

    Entry p of the head takes token p and the target's hidden state at p-1. ``pending`` holds the
    entries of tokens that were accepted in the last step, the next root among them: their hidden
    states are known, but the root's KV slot comes only with the next plan, so they are run at the
    beginning of the next step, all at once.
    """

    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        num_kv_slots: int,
        shape: TreeShape,
        table: RequestTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.head, self.target, self.table = head, target, table
        self.layers = head.config.num_attention_layers
        requests, hidden = table.run.shape[0], head.config.hidden_size
        max_depth, self.max_lanes = shape.steps + 1, shape.topk * (shape.steps - 1)
        self.pool = KVPool(
            self.layers,
            num_kv_slots,
            head.config.attention,
            dtype,
            device,
            num_spare=1 + requests * self.max_lanes,
        )
        self.pending_tokens = torch.zeros(requests, max_depth, dtype=torch.int64, device=device)
        self.pending_features = torch.zeros(requests, max_depth, hidden, dtype=dtype, device=device)
        self.pending_count = torch.zeros(requests, dtype=torch.int64, device=device)

    def observe_prefill(
        self, item: PrefillItem, tokens: Tensor, hidden: Tensor, before: Tensor
    ) -> None:
        features = torch.cat([before[None].to(hidden.dtype), hidden[:-1]])
        attention = causal_attention(
            self.pool,
            self.table.kv_slots[item.slot],
            item.start,
            len(item.token_ids),
            self.table.kv_slots[item.slot, item.start : item.start + len(item.token_ids)],
        )
        self.head(self.target.embed(tokens), features, AttentionOnly(attention))

    def observe_first_token(self, slot: int, token: Tensor, hidden: Tensor) -> None:
        self.pending_tokens[slot, 0] = token
        self.pending_features[slot, 0] = hidden.to(self.pending_features.dtype)
        self.pending_count[slot] = 1

    def observe_accepted(self, slots: Tensor, accepted: Truncated, hidden: Tensor) -> None:
        index = accepted.nodes[..., None].expand(-1, -1, hidden.shape[2])
        deep = accepted.nodes.shape[1]  # a step's tree may be shallower than the deepest
        self.pending_tokens[slots, :deep] = accepted.tokens
        self.pending_features[slots, :deep] = hidden.gather(1, index).to(
            self.pending_features.dtype
        )
        self.pending_count[slots] = accepted.count

    def propose(self, slots: Tensor, shape: TreeShape) -> Tree:
        table, b = self.table, slots.shape[0]
        root = self._run_pending(slots)  # [b, hidden_size], the head's guess after the root
        grown = candidates(table.last_token[slots], shape.topk)
        frontier = grown.expand(self._log_probs(root)[:, None])
        if shape.steps > 1:
            lanes = self._lanes(slots, shape.topk)
            features = root[:, None].expand(-1, shape.topk, -1)
        for _ in range(shape.steps - 1):
            index = frontier.lanes[..., None].expand(-1, -1, features.shape[2])
            features = features.gather(1, index)
            lanes.advance(frontier.lanes)
            hidden = self.head(
                self.target.embed(frontier.tokens.reshape(-1)),
                features.flatten(0, 1),
                AttentionOnly(lanes),
            )
            frontier = grown.expand(self._log_probs(hidden).unflatten(0, (b, shape.topk)))
            features = hidden.unflatten(0, (b, shape.topk))
        return grown.select(shape.nodes)

    def finish(self, slot: int) -> None:
        # all but the last pending entry, the root's: that token is never run
        if int(self.pending_count[slot]) > 1:
            self.pending_count[slot] -= 1
            slots = torch.tensor([slot], device=self.pending_count.device)
            self._run_pending(slots, last_position=int(self.table.run[slot]) - 1)
        self.pending_count[slot] = 0

    def _run_pending(self, slots: Tensor, last_position: int | None = None) -> Tensor:
        """Run the pending entries; they end at the root, or at ``last_position``. Returns the
        head's output at the last one, [b, hidden_size]."""
        table, counts = self.table, self.pending_count[slots]
        longest = max(int(counts.max()), 1)
        last = table.run[slots] if last_position is None else counts.new_tensor([last_position])
        offsets = torch.arange(longest, device=slots.device)
        prefix = (last - counts + 1).clamp_(min=0)  # [b]
        write = table.kv_slots[slots[:, None], prefix[:, None] + offsets]  # [b, E]
        write = torch.where(offsets < counts[:, None], write, self.pool.bin_slot)
        # a chain behind the prefix; what pads it stands at its end, where nobody looks
        parents = (offsets - 1).clamp_(min=0).expand_as(write).contiguous()
        chain = torch.ones(longest, longest, dtype=torch.bool, device=slots.device).tril()
        attention = tree_attention(
            self.pool,
            table.kv_slots,
            slots,
            prefix,
            write,
            parents,
            chain.expand(len(slots), -1, -1),
        )
        hidden = self.head(
            self.target.embed(self.pending_tokens[slots, :longest].reshape(-1)),
            self.pending_features[slots, :longest].flatten(0, 1),
            AttentionOnly(attention),
        ).unflatten(0, write.shape)
        at = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
        return hidden.gather(1, at)[:, 0]

    def _lanes(self, slots: Tensor, topk: int) -> LaneAttention | FusedLaneAttention:
        """Lanes that see all positions up to the root's, that is, up to ``run``."""
        last, kv_slots = self.table.run[slots], self.table.kv_slots
        if numba_math.usable(self.pool.k.device, self.pool.k.dtype):
            return FusedLaneAttention(self.pool, kv_slots, slots, last + 1, self.max_lanes)
        longest = int(last.max()) + 1
        hidden = torch.arange(longest, device=slots.device) > last[:, None]
        bias = torch.zeros(hidden.shape, device=slots.device)
        bias.masked_fill_(hidden, float("-inf"))
        return LaneAttention(self.pool, self.layers, kv_slots[slots, :longest], bias, topk)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        return self.target.compute_logits(hidden).log_softmax(-1)

    @property
    def num_bytes(self) -> int:
        return self.pool.num_bytes + sum(p.nbytes for p in self.head.parameters())
