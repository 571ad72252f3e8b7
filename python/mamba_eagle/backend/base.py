"""All operations of a step that depend on the device, in the form that runs everywhere.

The runner and the drafters are given one ``Backend``; they never ask for a device, a dtype or an
installed package. A backend with kernels overrides what has them; docs/design/backends.md lists
what each provides.

Shapes: b requests, T tree nodes, R request slots, V vocabulary, D = max_depth + 1. Slots, positions
and tokens in tensors are int64.
"""

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
from mamba_eagle.backend.rounding import StateRounding, Stochastic
from mamba_eagle.backend.state import SchemeSize, StatelessScheme, StateScheme
from mamba_eagle.backend.token_ops import TokenOps
from mamba_eagle.backend.torch.attention import (
    CausalAttention,
    GatheredBlocks,
    GatheredLanes,
    tree_attention,
)
from mamba_eagle.backend.torch.layer_ops import CudaOps
from mamba_eagle.backend.torch.prefill import TorchPrefillContext
from mamba_eagle.backend.torch.state import TORCH_SCHEMES
from mamba_eagle.layers.ops import TORCH, LayerOps
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.model_config import ModelConfig, MoEConfig, RecurrenceConfig
from mamba_eagle.tree.accept import Truncated


class Backend(TokenOps):
    """Operations for a model in ``place`` whose weights and activations are ``dtype``, of any kind,
    in torch."""

    name = "torch"

    def __init__(self, place: Place, dtype: torch.dtype, layer_ops: LayerOps | None = None) -> None:
        self.place, self.dtype = place, dtype
        self.layer_ops = layer_ops or (TORCH if place.on_host else CudaOps())

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def description(self) -> str:
        """The chosen implementations, in one line for the start-up log."""
        return f"{self.name} on {self.device}, layers by {self.layer_ops.name}"

    def inexact(self, model: ModelConfig) -> list[str]:
        """Why the bits of a token's logits may depend on how it is served: --exact refuses it."""
        return [f"--exact: not by {self.description}; leave the flag out"]

    # ── kernels that are compiled ──

    def prepare_builds(self, about: str) -> None:
        """The first thing that a runner calls: what is slow may begin here, beside the loading of
        weights. about: everything that decides which kernels there will be."""

    def build_kernels(self, rehearse: Callable[[], None]) -> None:
        """Compile in parallel all kernels that ``rehearse`` launches, which is everything that
        serving can need, if that takes longer one after the other."""

    # ── which parts may be captured in a graph ──

    attention_on_device = False  # whether attention of trees and lanes never waits for the host

    def experts_on_device(self, config: MoEConfig | None) -> bool:
        """Whether experts run without the host knowing how many tokens each of them gets; True
        without experts (None)."""
        # In float16 what no kernel takes is a loop over experts (``CudaOps.grouped_linear``).
        return config is None or (not self.place.on_host and self.dtype == torch.bfloat16)

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
            return self.stateless(table, pool)
        return self.scheme_kind(mode, config, pool)(config, size, table, pool)

    # without recurrent layers
    stateless: Callable[[RequestTable, StatePool], StateScheme] = StatelessScheme

    def scheme_kind(
        self, mode: str, config: RecurrenceConfig, pool: StatePool
    ) -> Callable[..., StateScheme]:
        """What makes the scheme of such layers."""
        return TORCH_SCHEMES[mode]

    stochastic: type[Stochastic] = Stochastic

    def state_rounding(self, mode: str, dtype: torch.dtype, table: RequestTable) -> StateRounding:
        """How states are rounded to ``dtype``; float32 needs no noise. mode: stochastic or nearest,
        as in --mamba-ssm-rounding."""
        if mode == "nearest" or dtype == torch.float32:
            return StateRounding(dtype)
        return self.stochastic(dtype, table.seed)

    def journal_kind(self, mixers: Sequence[Recurrent], pool: StatePool) -> type[SavedJournals]:
        """What makes the journals of a model with these recurrent layers."""
        return SavedJournals

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
        attention = self.prompt_attention(kv, slot_table, parts)
        return self.prompt_kind(recurrence, pool)(parts, pool, attention, self.place)

    def prompt_kind(
        self, recurrence: RecurrenceConfig | None, pool: StatePool
    ) -> Callable[..., PrefillContext]:
        """What makes the context of a pass over such layers."""
        return TorchPrefillContext

    def other_forms(self) -> list[AbstractContextManager[None]]:
        """Within each of them steps take other kernels than they otherwise would, so that those of
        long prompts, say, are compiled before a request needs them."""
        return []

    # ── trees ──

    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        """Make the accepted nodes part of the sequences in ``table``; only indices change.

        slots: [b] request slots. kv_slots: [b, T], of the nodes.
        """
        count = accepted.count
        offsets = torch.arange(accepted.nodes.shape[1], device=slots.device)
        columns = table.processed[slots][:, None] + offsets
        table.kv_slots[slots[:, None], columns] = kv_slots.gather(1, accepted.nodes)
        table.processed[slots] += count
        last = accepted.tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        table.last_token[slots] = torch.where(count > 0, last, table.last_token[slots])
        table.remaining[slots] = torch.where(accepted.finished, 0, table.remaining[slots] - count)

    def enter_roots(self, table: RequestTable, slots: Tensor, kv_slots: Tensor) -> None:
        """The KV slots of the roots, the first of kv_slots [b, T], join the requests' own."""
        table.kv_slots[slots, table.processed[slots]] = kv_slots[:, 0]

    def pending_entries(self, table: RequestTable, size: PendingSize) -> PendingEntries:
        """A queue of entries that a drafter has yet to process."""
        return PendingEntries(table, size)

    def step_program(
        self, target: Network, kv: KVPool, table: RequestTable, scheme: StateScheme, adapted: bool
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
