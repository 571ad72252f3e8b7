"""The interface of a backend: all operations of a step that depend on the device.

The runner and the drafters are given one ``Backend``; they never ask for a device, a dtype or an
installed package. docs/design/backends.md lists what each backend provides.

Shapes: b requests, T tree nodes, R request slots, V vocabulary, D = max_depth + 1. Slots, positions
and tokens in tensors are int64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from mamba_eagle.backend.rounding import StateRounding
from mamba_eagle.backend.state import SchemeSize, StateScheme
from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.sampling.tables import SampledNodes, SamplingTables
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.model_config import MoEConfig, RecurrenceConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree


class Backend(ABC):
    """Operations for a model in ``place`` whose weights and activations are ``dtype``."""

    name: str

    def __init__(self, place: Place, dtype: torch.dtype, layer_ops: LayerOps) -> None:
        self.place, self.dtype, self.layer_ops = place, dtype, layer_ops

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    @abstractmethod
    def description(self) -> str:
        """The chosen implementations, in one line for the start-up log."""

    # ── kernels that are compiled ──

    @abstractmethod
    def prepare_builds(self, about: str) -> None:
        """The first thing that a runner calls: what is slow may begin here, beside the loading of
        weights. about: everything that decides which kernels there will be."""

    @abstractmethod
    def build_kernels(self, rehearse: Callable[[], None]) -> None:
        """Compile in parallel all kernels that ``rehearse`` launches, which is everything that
        serving can need, if that takes longer one after the other."""

    # ── which parts may be captured in a graph ──

    @property
    @abstractmethod
    def attention_on_device(self) -> bool:
        """Whether attention of trees and lanes never waits for the host."""

    @abstractmethod
    def experts_on_device(self, config: MoEConfig | None) -> bool:
        """Whether experts run without the host knowing how many tokens each of them gets; True
        without experts (None)."""

    @property
    @abstractmethod
    def captures_graphs(self) -> bool:
        """Whether steps that never wait for the host can be captured in graphs."""

    # ── attention ──

    @abstractmethod
    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        """Attention of tree nodes; None if the pool has no layers."""

    @abstractmethod
    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        """Attention of the tokens of ``parts``, which are concatenated; slot_table [R, positions]
        holds their KV slots. None if the pool has no layers."""

    @abstractmethod
    def lane_attention(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> LaneAttention | None:
        """Attention of lanes that continue the first ``prefix`` [b] positions of their requests.

        slots: [b] request slots. max_lanes: spare KV slots that the pool has per request, for the
        lanes of all depths. None if the pool has no layers.
        """

    @abstractmethod
    def block_attention(self, pool: KVPool, rows: BlockRows) -> BlockRowAttention:
        """Attention of the rows of drafted blocks."""

    # ── recurrence ──

    @abstractmethod
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

    @abstractmethod
    def state_rounding(self, mode: str, dtype: torch.dtype, table: RequestTable) -> StateRounding:
        """How states are rounded to ``dtype``. mode: as in --mamba-ssm-rounding."""

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

    @abstractmethod
    def rows_ahead(self, accepts: int) -> int:
        """Rows beyond a tree's own that the deferred scheme needs to accept ``accepts`` tokens."""

    @abstractmethod
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

    def other_forms(self) -> list[AbstractContextManager[None]]:
        """Within each of them steps take other kernels than they otherwise would, so that those of
        long prompts, say, are compiled before a request needs them."""
        return []

    # ── trees ──

    @abstractmethod
    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        """An empty set of candidates for trees of at most ``depth`` levels. roots: [b] tokens."""

    @abstractmethod
    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        """The k best entries of ``log_softmax(logits)``: logits [n, V], any float dtype ->
        [n, k], log-probabilities in float32."""

    @abstractmethod
    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        """The k best entries of log_probs [n, V] float32 -> [n, k]."""

    @abstractmethod
    def top_noisy(self, logits: Tensor, ids: Tensor | None, noise: NoiseKeys, k: int) -> TopTokens:
        """The k best guesses of samples whose noise is known, and their log-probabilities given
        that noise: logits [b, lanes, V'], any float dtype -> [b, lanes, k].

        ids: [V'] int64, the target's token of each; None: V' is V.
        """

    @abstractmethod
    def top_part(
        self, logits: Tensor, first: int, ids: Tensor | None, noise: NoiseKeys | None, k: int
    ) -> Tensor:
        """What a rank tells the others of the tokens that it has the logits of, for the k best of
        all: logits [b, lanes, own V'], any float dtype -> [b·lanes, k + 1] int64.

        first: the number of the first one. ids: [own V'] int64, the target's token of each; None:
        V' is V. noise: that of ``top_noisy``; None: the logits themselves are ranked.
        """

    @abstractmethod
    def top_of_parts(
        self, told: Tensor, ids: Tensor | None, noise: NoiseKeys | None, lanes: int
    ) -> TopTokens:
        """As ``top_log_probs`` or ``top_noisy`` of all ranks' tokens, from all results of
        ``top_part``: [ranks, b·lanes, k + 1] -> [b, lanes, k]. ids: of all V' tokens."""

    @abstractmethod
    def accept_tokens(
        self, table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
    ) -> Truncated:
        """The accepted path of each tree, cut where its request ends (tree/accept.py).

        slots: [b] request slots. target: [b, T], the target's token at each node.
        """

    @abstractmethod
    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        """Make the accepted nodes part of the sequences in ``table``; only indices change.

        slots: [b] request slots. kv_slots: [b, T], of the nodes.
        """

    def enter_roots(self, table: RequestTable, slots: Tensor, kv_slots: Tensor) -> None:
        """The KV slots of the roots, the first of kv_slots [b, T], join the requests' own."""
        table.kv_slots[slots, table.processed[slots]] = kv_slots[:, 0]

    @abstractmethod
    def pending_entries(self, table: RequestTable, size: PendingSize) -> PendingEntries:
        """A queue of entries that a drafter has yet to process."""

    def step_program(
        self, target: Network, kv: KVPool, table: RequestTable, scheme: StateScheme
    ) -> StepProgram | None:
        """What verifies and commits in place of the model's layers, one by one, with the same
        results; None if nothing does."""
        return None

    def greedy_drafting(
        self, head: Network, pools: DraftPools, scheme: StateScheme
    ) -> GreedyDrafting | None:
        """What drafts for greedy requests in place of the drafter's own loop over depths, with the
        same results; None if nothing does. scheme: of the head's layers."""
        return None

    @abstractmethod
    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """-inf for tokens that a grammar forbids, in new memory: logits [n, V], of any
        dtype that steps have, rows [m] int64, indices of different rows, masks [m, W] int32, a bit
        per token -> [n, V]."""

    @abstractmethod
    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        """Standard Gumbel noise, a hash of (seed, position, token id): seed and position [n] ->
        [n, V] float32."""

    # ── sampling ──

    @abstractmethod
    def best_of(self, scores: Tensor) -> Tensor:
        """The lowest token id with the highest score, NO_TOKEN where that score is not finite or
        some score is NaN: [..., V] -> [...] int64."""

    @abstractmethod
    def best_keys(self, scores: Tensor, first: int, width: int, noise: RowNoise | None) -> Tensor:
        """Keys of a rank's best tokens, m for each row: scores [n, own V] of the tokens from
        ``first`` on -> [n, m] int64. width: the largest own V of any rank. noise: added to the
        scores, which are float32 then, if it is given."""

    @abstractmethod
    def best_tokens(self, keys: Tensor) -> Tensor:
        """The best token of each row, from the largest over ranks of what ``best_keys`` returns:
        [n, m] -> [n] int64, negative where none can be sampled."""

    @abstractmethod
    def count_tokens(self, counts: Tensor, slots: Tensor, tokens: Tensor, number: Tensor) -> None:
        """Add the first number[i] of tokens[i] to counts[slots[i]]: counts [R, V] int32, slots and
        number [b], tokens [b, D]; the host need not know how many."""

    @property
    def samples_in_kernels(self) -> bool:
        """Whether ``sample_nodes`` exists. Elsewhere runner/sampler.py does it in torch."""
        return False

    def sample_nodes(self, logits: Tensor, nodes: SampledNodes, tables: SamplingTables) -> Tensor:
        """The target's token at every node, without asking the host: logits [b, T, V], any float
        dtype -> [b, T], negative where none can be sampled."""
        raise AssertionError("only where samples_in_kernels")
