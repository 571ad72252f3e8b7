"""The interface of a backend: everything in a step that depends on where it runs.

The runner and the drafters get one ``Backend`` handed in and call it; none of them asks for a
device, a dtype or an installed package. docs/design/backends.md says what each backend provides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import LaneAttention, NewTokenAttention, TreeNodes
from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.backend.state import SchemeSize, StateScheme
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.model_config import Mamba2Config, MoEConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree


class Backend(ABC):
    """What runs a model whose weights and activations are ``dtype`` in ``place``."""

    name: str

    def __init__(self, place: Place, dtype: torch.dtype, layer_ops: LayerOps) -> None:
        self.place, self.dtype, self.layer_ops = place, dtype, layer_ops

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    @abstractmethod
    def description(self) -> str:
        """What was chosen, in one line for the start-up log."""

    # ── what of it may be captured in a graph ──

    @property
    @abstractmethod
    def attention_on_device(self) -> bool:
        """Whether attention of trees and lanes never waits for the host."""

    @abstractmethod
    def experts_on_device(self, config: MoEConfig | None) -> bool:
        """Whether the host need not know how many tokens go to each expert."""

    @property
    @abstractmethod
    def captures_graphs(self) -> bool:
        """Whether steps whose parts are all on the device can be captured."""

    # ── attention ──

    @abstractmethod
    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        """Of tree nodes; None if the pool has no layers."""

    @abstractmethod
    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        """Of the tokens of ``parts``, one after the other; slot_table [R, positions] holds their
        KV slots. None if the pool has no layers."""

    @abstractmethod
    def lane_attention(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> LaneAttention | None:
        """Of lanes that see the first ``prefix`` [b] positions of their requests ``slots`` [b]; the
        pool has ``max_lanes`` spare slots for each. None if the pool has no layers."""

    # ── recurrence ──

    @abstractmethod
    def state_scheme(
        self,
        mode: str,
        config: Mamba2Config | None,
        size: SchemeSize,
        table: RequestTable,
        pool: StatePool,
    ) -> StateScheme:
        """mode: deferred or snapshot, as --mamba-verify-mode. config: None without Mamba2 layers.

        Raises: ValueError if the tokens accepted in a step find no room in ``size.rows``.
        """

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
        mamba: Mamba2Config | None,
    ) -> PrefillContext:
        """For the prompt chunks ``parts``, one after the other in the flat input."""

    # ── trees ──

    @abstractmethod
    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        """Draft trees of ``depth`` levels at most from the roots [b]."""

    @abstractmethod
    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        """The k best of ``log_softmax(logits)``, in float32. logits: [n, V], any float dtype."""

    @abstractmethod
    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        """The same of log-probabilities: [n, V] float32."""

    @abstractmethod
    def accept_tokens(
        self, table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
    ) -> Truncated:
        """What each request accepts of its tree, up to its own end. target [b, T] int64."""

    @abstractmethod
    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        """The accepted nodes become part of the sequence: indices only. kv_slots [b, T]."""

    @abstractmethod
    def pending_entries(self, table: RequestTable, size: PendingSize) -> PendingEntries:
        """Entries that wait for a drafter."""

    @abstractmethod
    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        """Standard Gumbel noise of (seed, position, token id): both [n] int64 -> [n, V] float32."""
