"""An NVIDIA GPU: Triton kernels; FlashInfer for prompts where there is no kernel of our own."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from mamba_eagle.backend.attention import LaneAttention, NewTokenAttention, TreeNodes
from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.pending import PendingEntries, Taken
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.backend.rounding import Stochastic
from mamba_eagle.backend.state import StatelessScheme, StateScheme
from mamba_eagle.backend.triton.attention import TritonBlocks, TritonLanes, TritonTreeAttention
from mamba_eagle.backend.triton.builds import KernelBuilds
from mamba_eagle.backend.triton.deferred import TritonDeferred
from mamba_eagle.backend.triton.delta import TritonDelta
from mamba_eagle.backend.triton.delta_prefill import DeltaPrefillContext, DeltaScan, TorchScan
from mamba_eagle.backend.triton.layer import delta_supported, sizes_supported
from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.backend.triton.prefill import TritonPrefillContext
from mamba_eagle.backend.triton.prompt_attention import GatheredPrompts
from mamba_eagle.backend.triton.snapshot import TritonSnapshot
from mamba_eagle.kernels.accept import triton as accept
from mamba_eagle.kernels.accept.triton_pending import append_pending, take_pending
from mamba_eagle.kernels.best_token import triton as best_token
from mamba_eagle.kernels.draft_tree.triton import Grown, Lanes, expand, select
from mamba_eagle.kernels.gpu import capability
from mamba_eagle.kernels.prompt_attention import gluon as prompt_attention
from mamba_eagle.kernels.sampling.triton import sample_nodes
from mamba_eagle.kernels.sampling_noise.triton import gumbel
from mamba_eagle.kernels.state_rounding.triton import token_keys
from mamba_eagle.kernels.token_mask.triton import mask_logits
from mamba_eagle.kernels.top_log_probs import triton as top
from mamba_eagle.kernels.top_log_probs.torch import MAX_TOP, TopTokens
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.kernels.top_parts import triton as parts
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.model_config import RecurrenceConfig
from mamba_eagle.tree.accept import Truncated, empty_truncated
from mamba_eagle.tree.candidates import Candidates, Frontier
from mamba_eagle.tree.simulate import Forced
from mamba_eagle.tree.tree import Tree, single_node_tree


class TritonPendingEntries(PendingEntries):
    def take(self, slots: Tensor, counts: Tensor | None, longest: int) -> Taken:
        b, table = len(slots), self.table
        nodes, tokens, own, positions = (slots.new_empty(b, longest) for _ in range(4))
        finished = torch.empty(b, dtype=torch.bool, device=slots.device)
        accepted = Truncated(nodes, tokens, slots.new_empty(b), finished)
        taken = Taken(accepted, slots.new_empty(b), own, positions)
        tables = (table.remaining, self.processed, self.pending, self.tokens, table.kv_slots)
        take_pending(slots, counts, *tables, self.padding_slot, *accepted, *taken[1:])
        return taken

    def _append(self, slots: Tensor, accepted: Truncated, entries: Tensor) -> None:
        new = (accepted.tokens, accepted.count, entries)
        append_pending(slots, *new, self.tokens, self.features, self.pending)


class TritonCandidates(Candidates):
    """Candidates in buffers with room for ``depth`` expansions."""

    def __init__(self, roots: Tensor, topk: int, depth: int) -> None:
        self.roots, self.topk = roots.unsqueeze(1), topk
        self._seen, self._depth = 1, 0
        self._lanes: Lanes | None = None
        shape = (len(roots), 1 + topk + (depth - 1) * topk * topk)
        self._grown = Grown(
            tokens=roots.new_empty(shape),
            parents=roots.new_empty(shape),
            scores=torch.empty(shape, device=roots.device),
        )

    def expand(self, best: TopTokens) -> Frontier:
        self._lanes = lanes = expand(*best, self.roots, self._lanes, self._grown, self._seen)
        self._seen += best.tokens[0].numel()
        self._depth += 1
        return Frontier(lanes.tokens, lanes.lanes, lanes.scores)

    def select(self, num_nodes: int) -> Tree:
        self._check(num_nodes)
        if not self._depth:
            return single_node_tree(self.roots[:, 0])
        shape, device = (len(self.roots), num_nodes), self.roots.device
        tree = Tree(
            tokens=self.roots.new_empty(shape),
            parents=self.roots.new_empty(shape),
            depths=self.roots.new_empty(shape),
            ancestors=torch.empty(*shape, num_nodes, dtype=torch.bool, device=device),
            scores=torch.empty(shape, device=device),
        )
        select(self._grown, self._seen, self.topk, self._depth, *tree)
        return tree


MAX_HISTORY = 3  # K-1 of the widest convolution that published models have
SCHEMES = {"deferred": TritonDeferred, "snapshot": TritonSnapshot}  # for Mamba2


class TritonStochastic(Stochastic):
    """Keys in one launch; ``round`` is torch's, for what has no kernel."""

    def keys(self, slots: Tensor, positions: Tensor) -> Tensor:
        return token_keys(self.seeds, slots, positions)


class TritonBackend(Backend):
    """Falls back to torch for the recurrence if the kernels do not support its kind or sizes, for
    snapshots of delta rules, their prompts without fla-core, and for more than MAX_TOP lanes."""

    name = "triton"
    attention_on_device = True
    samples_in_kernels = True
    stochastic = TritonStochastic

    def __init__(self, place: Place, dtype: torch.dtype, flashinfer: bool) -> None:
        super().__init__(place, dtype, TritonOps())
        self.flashinfer = flashinfer
        self.builds: KernelBuilds | None = None

    def prepare_builds(self, about: str) -> None:
        if self.place.overlaps:  # not in Triton's interpreter
            target = f"{self.dtype} {capability(self.device)} {self.description}"
            self.builds = KernelBuilds(f"{about} {target}")

    def build_kernels(self, rehearse: Callable[[], None]) -> None:
        if self.builds is not None:
            self.builds.build(rehearse)

    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        return TritonTreeAttention(pool, nodes) if pool.num_layers else None

    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        if not pool.num_layers:
            return super().prompt_attention(pool, slot_table, parts)
        spans = [part.span for part in parts]
        if prompt_attention.supports(pool.k.shape[-1], self.dtype, self.device):
            return GatheredPrompts(pool, slot_table, spans, self.place)
        if self.flashinfer:
            # an optional package; importing it takes seconds
            from mamba_eagle.backend.triton.flashinfer import HEAD_DIMS, FlashInferPrompts

            if pool.k.shape[-1] in HEAD_DIMS:
                return FlashInferPrompts(pool, slot_table, spans)
        return super().prompt_attention(pool, slot_table, parts)

    def lane_attention(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> LaneAttention | None:
        if not pool.num_layers:
            return None
        return TritonLanes(pool, slot_table, slots, prefix, max_lanes)

    stateless = staticmethod(partial(StatelessScheme, pack=pack_paths))

    def scheme_kind(
        self, mode: str, config: RecurrenceConfig, pool: StatePool
    ) -> Callable[..., StateScheme]:
        if mode == "deferred" and delta_supported(config):
            return TritonDelta
        if not sizes_supported(config):
            return super().scheme_kind(mode, config, pool)
        return SCHEMES[mode]

    def rows_ahead(self, accepts: int) -> int:
        """Folds are decided before the step's path is known, so the journal needs room for a whole
        path; and rows of history are not reused."""
        return accepts + MAX_HISTORY

    def prompt_kind(
        self, recurrence: RecurrenceConfig | None, pool: StatePool
    ) -> Callable[..., PrefillContext]:
        if recurrence is not None and delta_supported(recurrence):
            scan = TorchScan() if recurrence.channel_decay else self._delta_scan
            return partial(DeltaPrefillContext, scan=scan)
        if recurrence is not None and sizes_supported(recurrence):
            return TritonPrefillContext
        return super().prompt_kind(recurrence, pool)

    @cached_property
    def _delta_scan(self) -> DeltaScan:
        if not self.place.overlaps or find_spec("fla") is None:  # Triton's interpreter has no fla
            return TorchScan()
        # an optional package; importing it takes seconds
        from mamba_eagle.backend.triton.fla import FlaScan

        return FlaScan()

    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        if topk > MAX_TOP:
            return super().candidates(roots, topk, depth)
        return TritonCandidates(roots, topk, depth)

    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        if k > MAX_TOP:
            return super().top_log_probs(logits, k)
        return top.top_log_probs(logits, k)

    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        return self.top_log_probs(log_probs, k)

    def top_noisy(self, logits: Tensor, ids: Tensor | None, noise: NoiseKeys, k: int) -> TopTokens:
        if k > MAX_TOP:
            return super().top_noisy(logits, ids, noise, k)
        return parts.top_noisy(logits, ids, noise, k)

    def top_part(
        self, logits: Tensor, first: int, ids: Tensor | None, noise: NoiseKeys | None, k: int
    ) -> Tensor:
        if k > MAX_TOP:
            return super().top_part(logits, first, ids, noise, k)
        return parts.packed(logits, first, ids, noise, k)

    def top_of_parts(
        self, of_ranks: Tensor, ids: Tensor | None, noise: NoiseKeys | None, lanes: int
    ) -> TopTokens:
        if of_ranks.shape[2] > MAX_TOP + 1:
            return super().top_of_parts(of_ranks, ids, noise, lanes)
        return parts.merged(of_ranks, ids, noise, lanes)

    def accept_tokens(
        self,
        table: RequestTable,
        slots: Tensor,
        tree: Tree,
        target: Tensor,
        max_depth: int,
        forced: Forced | None = None,
    ) -> Truncated:
        accepted = empty_truncated(len(slots), max_depth, self.device)
        inputs = (tree.tokens, tree.parents, target, table.stop_tokens, table.remaining, slots)
        path = () if forced is None else (tree.depths.contiguous(), *forced)
        accept.accept_and_truncate(*inputs, *accepted, *path)
        return accepted

    accept_forced = accept_tokens

    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        changed = (table.kv_slots, table.processed, table.last_token, table.remaining)
        accept.commit(slots, kv_slots, *accepted, *changed)

    # kernels that are the method
    block_attention = staticmethod(TritonBlocks)
    pending_entries = staticmethod(TritonPendingEntries)
    mask_logits = staticmethod(mask_logits)
    gumbel = staticmethod(gumbel)
    best_of = staticmethod(best_token.best_of)
    best_keys = staticmethod(best_token.best_keys)
    best_tokens = staticmethod(best_token.best_tokens)
    sample_nodes = staticmethod(sample_nodes)
