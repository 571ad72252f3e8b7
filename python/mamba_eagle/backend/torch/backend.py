"""The backend that runs everywhere; the others fall back to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import (
    BlockRowAttention,
    BlockRows,
    LaneAttention,
    NewTokenAttention,
    TreeNodes,
)
from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.backend.rounding import StateRounding, state_rounding
from mamba_eagle.backend.state import SchemeSize, StateScheme
from mamba_eagle.backend.stateless import StatelessScheme
from mamba_eagle.backend.torch import accept
from mamba_eagle.backend.torch.attention import (
    CausalAttention,
    GatheredBlocks,
    GatheredLanes,
    tree_attention,
)
from mamba_eagle.backend.torch.layer_ops import CudaOps, HostOps
from mamba_eagle.backend.torch.prefill import TorchPrefillContext
from mamba_eagle.backend.torch.state import TORCH_SCHEMES
from mamba_eagle.kernels.best_token.torch import RowNoise, best_keys, best_of, best_tokens
from mamba_eagle.kernels.sampling.torch import count_tokens
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.kernels.token_mask.torch import mask_logits
from mamba_eagle.kernels.top_log_probs.torch import TopTokens, top_log_probs
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys, noisy_scores
from mamba_eagle.kernels.top_parts.torch import merged, packed
from mamba_eagle.layers.ops import TORCH, LayerOps
from mamba_eagle.model_config import MoEConfig, RecurrenceConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree


class TorchBackend(Backend):
    """Torch operations on any device and in any dtype."""

    name = "torch"

    def __init__(self, place: Place, dtype: torch.dtype, layer_ops: LayerOps | None = None) -> None:
        super().__init__(place, dtype, layer_ops or _layer_ops(place, dtype))

    @property
    def description(self) -> str:
        return f"{self.name} on {self.device}, layers by {self.layer_ops.name}"

    def prepare_builds(self, about: str) -> None: ...

    def build_kernels(self, rehearse: Callable[[], None]) -> None: ...

    @property
    def attention_on_device(self) -> bool:
        return False

    def experts_on_device(self, config: MoEConfig | None) -> bool:
        return config is None or (not self.place.on_host and self.dtype == torch.bfloat16)

    @property
    def captures_graphs(self) -> bool:
        return not self.place.on_host

    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        return tree_attention(pool, nodes) if pool.num_layers else None

    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        spans = [part.span for part in parts]
        return CausalAttention(pool, slot_table, spans) if pool.num_layers else None

    def lane_attention(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> LaneAttention | None:
        return GatheredLanes(pool, slot_table, slots, prefix) if pool.num_layers else None

    def block_attention(self, pool: KVPool, rows: BlockRows) -> BlockRowAttention:
        return GatheredBlocks(pool, rows)

    def state_scheme(
        self,
        mode: str,
        config: RecurrenceConfig | None,
        size: SchemeSize,
        table: RequestTable,
        pool: StatePool,
    ) -> StateScheme:
        if config is None:
            return StatelessScheme(table, pool)
        return TORCH_SCHEMES[mode](config, size, table, pool)

    def state_rounding(self, mode: str, dtype: torch.dtype, table: RequestTable) -> StateRounding:
        return state_rounding(mode, dtype, table.seed)

    def rows_ahead(self, accepts: int) -> int:
        return 0

    def prefill_context(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        kv: KVPool,
        slot_table: Tensor,
        recurrence: RecurrenceConfig | None,
    ) -> PrefillContext:
        return TorchPrefillContext(
            parts, pool, self.prompt_attention(kv, slot_table, parts), self.place
        )

    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        return Candidates(roots, topk)

    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        return top_log_probs(logits, k)

    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        return TopTokens(*log_probs.topk(k))

    def top_noisy(self, logits: Tensor, ids: Tensor | None, noise: NoiseKeys, k: int) -> TopTokens:
        columns = slice(None) if ids is None else ids
        scores = noisy_scores(logits.float(), columns, noise, self.gumbel)
        best = self.top_log_probs(scores.flatten(0, 1), k)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten(logits.shape[:2])

    def top_part(
        self, logits: Tensor, first: int, ids: Tensor | None, noise: NoiseKeys | None, k: int
    ) -> Tensor:
        scores = logits.float()
        if noise is not None:
            columns = slice(first, first + logits.shape[2]) if ids is None else ids
            scores = noisy_scores(scores, columns, noise, self.gumbel)
        scores = scores.flatten(0, 1)
        best = self.top_log_probs(scores, min(k, scores.shape[1]))
        return packed(scores, best, first, k)

    def top_of_parts(
        self, told: Tensor, ids: Tensor | None, noise: NoiseKeys | None, lanes: int
    ) -> TopTokens:
        best = merged(told)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten((told.shape[1] // lanes, lanes))

    def accept_tokens(
        self, table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
    ) -> Truncated:
        return accept.accept_tokens(table, slots, tree, target, max_depth)

    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        accept.commit_tokens(table, slots, kv_slots, accepted)

    def pending_entries(self, table: RequestTable, size: PendingSize) -> PendingEntries:
        return PendingEntries(table, size)

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        return mask_logits(logits, rows, masks)

    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        return gumbel(seed, position, vocab_size)

    def best_keys(self, scores: Tensor, first: int, width: int, noise: RowNoise | None) -> Tensor:
        return best_keys(scores, first, noise, self.gumbel)

    def best_of(self, scores: Tensor) -> Tensor:
        return best_of(scores)

    def best_tokens(self, keys: Tensor) -> Tensor:
        return best_tokens(keys)

    def count_tokens(self, counts: Tensor, slots: Tensor, tokens: Tensor, number: Tensor) -> None:
        count_tokens(counts, slots, tokens, number)


def _layer_ops(place: Place, dtype: torch.dtype) -> LayerOps:
    if not place.on_host:
        return CudaOps()
    return HostOps() if dtype == torch.float32 else TORCH
