"""All operations of a step that depend on the device, in the form that runs everywhere.

The runner and the drafters are given one ``Backend``; they never ask for a device, a dtype or an
installed package. A backend with kernels overrides what has them; docs/design/backends.md lists
what each provides.

Shapes: b requests, T tree nodes, R request slots, V vocabulary, D = max_depth + 1. Slots, positions
and tokens in tensors are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mamba_eagle.backend.attention import (
    BlockRowAttention,
    BlockRows,
    LaneAttention,
    NewTokenAttention,
    TreeNodes,
)
from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.backend.programs import DraftPools, GreedyDrafting, Network, StepProgram
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
from mamba_eagle.kernels.sampling.tables import SampledNodes, SamplingTables
from mamba_eagle.kernels.sampling.torch import count_tokens
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.kernels.token_mask.torch import mask_logits
from mamba_eagle.kernels.top_log_probs.torch import TopTokens, top_log_probs
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys, noisy_scores
from mamba_eagle.kernels.top_parts.torch import merged, packed
from mamba_eagle.layers.ops import TORCH, LayerOps
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.model_config import MoEConfig, RecurrenceConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree


class Backend:
    """Operations for a model in ``place`` whose weights and activations are ``dtype``, of any kind,
    in torch."""

    name = "torch"

    def __init__(self, place: Place, dtype: torch.dtype, layer_ops: LayerOps | None = None) -> None:
        self.place, self.dtype = place, dtype
        self.layer_ops = layer_ops or _layer_ops(place, dtype)

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def description(self) -> str:
        """The chosen implementations, in one line for the start-up log."""
        return f"{self.name} on {self.device}, layers by {self.layer_ops.name}"

    # ── kernels that are compiled ──

    def prepare_builds(self, about: str) -> None:
        """The first thing that a runner calls: what is slow may begin here, beside the loading of
        weights. about: everything that decides which kernels there will be."""

    def build_kernels(self, rehearse: Callable[[], None]) -> None:
        """Compile in parallel all kernels that ``rehearse`` launches, which is everything that
        serving can need, if that takes longer one after the other."""

    # ── which parts may be captured in a graph ──

    @property
    def attention_on_device(self) -> bool:
        """Whether attention of trees and lanes never waits for the host."""
        return False

    def experts_on_device(self, config: MoEConfig | None) -> bool:
        """Whether experts run without the host knowing how many tokens each of them gets; True
        without experts (None)."""
        # In float16 what no kernel takes is a loop over experts (``CudaOps.grouped_linear``).
        return config is None or (not self.place.on_host and self.dtype == torch.bfloat16)

    @property
    def captures_graphs(self) -> bool:
        """Whether steps that never wait for the host can be captured in graphs."""
        return not self.place.on_host

    # ── attention ──

    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        """Attention of tree nodes; None if the pool has no layers."""
        return tree_attention(pool, nodes) if pool.num_layers else None

    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        """Attention of the tokens of ``parts``, which are concatenated; slot_table [R, positions]
        holds their KV slots. None if the pool has no layers."""
        spans = [part.span for part in parts]
        return CausalAttention(pool, slot_table, spans) if pool.num_layers else None

    def lane_attention(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> LaneAttention | None:
        """Attention of lanes that continue the first ``prefix`` [b] positions of their requests.

        slots: [b] request slots. max_lanes: spare KV slots that the pool has per request, for the
        lanes of all depths. None if the pool has no layers.
        """
        return GatheredLanes(pool, slot_table, slots, prefix) if pool.num_layers else None

    def block_attention(self, pool: KVPool, rows: BlockRows) -> BlockRowAttention:
        """Attention of the rows of drafted blocks."""
        return GatheredBlocks(pool, rows)

    # ── recurrence ──

    def state_scheme(
        self,
        mode: str,
        config: RecurrenceConfig | None,
        size: SchemeSize,
        table: RequestTable,
        pool: StatePool,
    ) -> StateScheme:
        """The scheme that keeps recurrent states through verification.

        mode: deferred or snapshot, as in --mamba-verify-mode. config: None without recurrent
        layers.

        Raises: ValueError if ``size.rows`` has no room for the tokens that a step may accept.
        """
        if config is None:
            return StatelessScheme(table, pool)
        return TORCH_SCHEMES[mode](config, size, table, pool)

    def state_rounding(self, mode: str, dtype: torch.dtype, table: RequestTable) -> StateRounding:
        """How states are rounded to ``dtype``. mode: as in --mamba-ssm-rounding."""
        return state_rounding(mode, dtype, table.seed)

    def saved_journals(
        self,
        num_slots: int,
        size: int,
        mixers: Sequence[Recurrent],
        pool: StatePool,
        table: RequestTable,
    ) -> SavedJournals:
        """``num_slots`` journal slots of ``size`` rows; mixers: those of the model, in the order of
        the pool's layers."""
        return SavedJournals(num_slots, size, mixers, pool, table, self.place)

    def rows_ahead(self, accepts: int) -> int:
        """Rows beyond a tree's own that the deferred scheme needs to accept ``accepts`` tokens."""
        return 0

    def prefill_context(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        kv: KVPool,
        slot_table: Tensor,
        recurrence: RecurrenceConfig | None,
    ) -> PrefillContext:
        """The context of a forward pass over the prompt chunks ``parts``, which are concatenated in
        the flat input. slot_table: [R, positions] KV slots."""
        return TorchPrefillContext(
            parts, pool, self.prompt_attention(kv, slot_table, parts), self.place
        )

    def other_forms(self) -> list[AbstractContextManager[None]]:
        """Within each of them steps take other kernels than they otherwise would, so that those of
        long prompts, say, are compiled before a request needs them."""
        return []

    # ── trees ──

    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        """An empty set of candidates for trees of at most ``depth`` levels. roots: [b] tokens."""
        return Candidates(roots, topk)

    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        """The k best entries of ``log_softmax(logits)``: logits [n, V], any float dtype ->
        [n, k], log-probabilities in float32."""
        return top_log_probs(logits, k)

    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        """The k best entries of log_probs [n, V] float32 -> [n, k]."""
        return TopTokens(*log_probs.topk(k))

    def top_noisy(self, logits: Tensor, ids: Tensor | None, noise: NoiseKeys, k: int) -> TopTokens:
        """The k best guesses of samples whose noise is known, and their log-probabilities given
        that noise: logits [b, lanes, V'], any float dtype -> [b, lanes, k].

        ids: [V'] int64, the target's token of each; None: V' is V.
        """
        columns = slice(None) if ids is None else ids
        scores = noisy_scores(logits.float(), columns, noise, self.gumbel)
        best = self.top_log_probs(scores.flatten(0, 1), k)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten(logits.shape[:2])

    def top_part(
        self, logits: Tensor, first: int, ids: Tensor | None, noise: NoiseKeys | None, k: int
    ) -> Tensor:
        """What a rank tells the others of the tokens that it has the logits of, for the k best of
        all: logits [b, lanes, own V'], any float dtype -> [b·lanes, k + 1] int64.

        first: the number of the first one. ids: [own V'] int64, the target's token of each; None:
        V' is V. noise: that of ``top_noisy``; None: the logits themselves are ranked.
        """
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
        """As ``top_log_probs`` or ``top_noisy`` of all ranks' tokens, from all results of
        ``top_part``: [ranks, b·lanes, k + 1] -> [b, lanes, k]. ids: of all V' tokens."""
        best = merged(told)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten((told.shape[1] // lanes, lanes))

    def accept_tokens(
        self, table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
    ) -> Truncated:
        """The accepted path of each tree, cut where its request ends (tree/accept.py).

        slots: [b] request slots. target: [b, T], the target's token at each node.
        """
        return accept.accept_tokens(table, slots, tree, target, max_depth)

    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        """Make the accepted nodes part of the sequences in ``table``; only indices change.

        slots: [b] request slots. kv_slots: [b, T], of the nodes.
        """
        accept.commit_tokens(table, slots, kv_slots, accepted)

    def enter_roots(self, table: RequestTable, slots: Tensor, kv_slots: Tensor) -> None:
        """The KV slots of the roots, the first of kv_slots [b, T], join the requests' own."""
        table.kv_slots[slots, table.processed[slots]] = kv_slots[:, 0]

    def pending_entries(self, table: RequestTable, size: PendingSize) -> PendingEntries:
        """A queue of entries that a drafter has yet to process."""
        return PendingEntries(table, size)

    def step_program(
        self,
        target: Network,
        kv: KVPool,
        table: RequestTable,
        scheme: StateScheme,
        adapted: bool,
    ) -> StepProgram | None:
        """What verifies and commits in place of the model's layers, one by one, with the same
        results; None if nothing does. adapted: where some requests have adapters."""
        return None

    def greedy_drafting(
        self, head: Network, pools: DraftPools, scheme: StateScheme
    ) -> GreedyDrafting | None:
        """What drafts for greedy requests in place of the drafter's own loop over depths, with the
        same results; None if nothing does. scheme: of the head's layers."""
        return None

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """-inf for tokens that a grammar forbids, in new memory: logits [n, V], of any
        dtype that steps have, rows [m] int64, indices of different rows, masks [m, W] int32, a bit
        per token -> [n, V]."""
        return mask_logits(logits, rows, masks)

    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        """Standard Gumbel noise, a hash of (seed, position, token id): seed and position [n] ->
        [n, V] float32."""
        return gumbel(seed, position, vocab_size)

    # ── sampling ──

    def best_of(self, scores: Tensor) -> Tensor:
        """The lowest token id with the highest score, NO_TOKEN where that score is not finite or
        some score is NaN: [..., V] -> [...] int64."""
        return best_of(scores)

    def best_keys(self, scores: Tensor, first: int, width: int, noise: RowNoise | None) -> Tensor:
        """Keys of a rank's best tokens, m for each row: scores [n, own V] of the tokens from
        ``first`` on -> [n, m] int64. width: the largest own V of any rank. noise: added to the
        scores, which are float32 then, if it is given."""
        return best_keys(scores, first, noise, self.gumbel)

    def best_tokens(self, keys: Tensor) -> Tensor:
        """The best token of each row, from the largest over ranks of what ``best_keys`` returns:
        [n, m] -> [n] int64, negative where none can be sampled."""
        return best_tokens(keys)

    def count_tokens(self, counts: Tensor, slots: Tensor, tokens: Tensor, number: Tensor) -> None:
        """Add the first number[i] of tokens[i] to counts[slots[i]]: counts [R, V] int32, slots and
        number [b], tokens [b, D]; the host need not know how many."""
        count_tokens(counts, slots, tokens, number)

    @property
    def samples_in_kernels(self) -> bool:
        """Whether ``sample_nodes`` exists. Elsewhere runner/sampler.py does it in torch."""
        return False

    def sample_nodes(self, logits: Tensor, nodes: SampledNodes, tables: SamplingTables) -> Tensor:
        """The target's token at every node, without asking the host: logits [b, T, V], any float
        dtype -> [b, T], negative where none can be sampled."""
        raise AssertionError("only where samples_in_kernels")


def _layer_ops(place: Place, dtype: torch.dtype) -> LayerOps:
    if not place.on_host:
        return CudaOps()
    return HostOps() if dtype == torch.float32 else TORCH
