"""A CPU in float32: Numba kernels that fuse a layer's small operations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

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
from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.backend.programs import DraftPools, GreedyDrafting, Network, StepProgram
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.backend.token_ops import TokenLogprobs
from mamba_eagle.cpu.abi import BestOf, EnterRoots
from mamba_eagle.cpu.attention import CpuBlocks, CpuLanes, CpuPromptAttention, CpuTreeAttention
from mamba_eagle.cpu.drafting import CpuCandidates, CpuPendingEntries
from mamba_eagle.cpu.layer_ops import CpuOps
from mamba_eagle.cpu.ops import accept, token_mask
from mamba_eagle.cpu.ops import top_log_probs as cpu_top
from mamba_eagle.cpu.prefill import CpuJournals, CpuPrefillContext
from mamba_eagle.cpu.products.packed import MANY_ROWS, PromptProduct, float_product
from mamba_eagle.cpu.programs.drafts import draft_program
from mamba_eagle.cpu.programs.prompts import MOST_TOKENS, PromptPrograms
from mamba_eagle.cpu.programs.steps import target_program
from mamba_eagle.cpu.spans.steps import BEST_OF, ENTER_ROOTS
from mamba_eagle.cpu.state import CPU_SCHEMES, CpuDeferred, CpuStateless
from mamba_eagle.cpu.threads import num_threads, parallel_forms
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.layers.products import PackedProduct
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.model_config import DeltaConfig, Mamba2Config, ModelConfig, RecurrenceConfig
from mamba_eagle.tree.accept import Truncated, empty_truncated
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree

SCORES_PER_NS = 8  # that are looked at for the largest


class CpuBackend(Backend):
    """torch processes recurrences other than Mamba2 and delta rules with a decay per head, those
    whose states are not float32, and attention if the KV cache is not."""

    name = "cpu"

    def __init__(
        self, place: Place, product: Callable[[Tensor], PackedProduct] = float_product
    ) -> None:
        """product: that with weights of 16 and 32 bits."""
        super().__init__(place, torch.float32, CpuOps(product))
        # oneDNN's products of many rows are not for programs
        self.prompts = PromptPrograms(MANY_ROWS - 1 if product is PromptProduct else MOST_TOKENS)

    def inexact(self, model: ModelConfig) -> list[str]:
        recurrence, attention = model.recurrence, model.attention
        wrong = {
            "a decay per channel": getattr(recurrence, "channel_decay", False),
            "latent attention": attention is not None and attention.latent is not None,
        }
        return [
            f"--exact: {model.model_type} has {what}, which torch computes, in another order in "
            "prompts than in trees; leave the flag out"
            for what, has in wrong.items()
            if has
        ]

    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        if pool.k.dtype != torch.float32:
            return super().tree_attention(pool, nodes)
        return CpuTreeAttention(pool, nodes) if pool.num_layers else None

    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        if not pool.num_layers or pool.k.dtype != torch.float32:
            return super().prompt_attention(pool, slot_table, parts)
        return CpuPromptAttention(pool, slot_table, [part.span for part in parts])

    def lane_attention(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> LaneAttention | None:
        if not pool.num_layers:
            return None
        if pool.k.dtype != torch.float32:
            return super().lane_attention(pool, slot_table, slots, prefix, max_lanes)
        return CpuLanes(pool, slot_table, slots, prefix, max_lanes)

    def block_attention(self, pool: KVPool, rows: BlockRows) -> BlockRowAttention:
        if pool.k.dtype != torch.float32:
            return super().block_attention(pool, rows)
        return CpuBlocks(pool, rows)

    stateless = CpuStateless

    def scheme_kind(
        self, mode: str, config: RecurrenceConfig, pool: StatePool
    ) -> Callable[..., StateScheme]:
        if not _has_kernels(config, pool):
            return super().scheme_kind(mode, config, pool)
        return CPU_SCHEMES[mode]

    def journal_kind(self, mixers: Sequence[Recurrent], pool: StatePool) -> type[SavedJournals]:
        ours = mixers and _has_kernels(mixers[0].config, pool)
        return CpuJournals if ours else SavedJournals

    def prompt_kind(
        self, recurrence: RecurrenceConfig | None, pool: StatePool
    ) -> Callable[..., PrefillContext]:
        if not _has_kernels(recurrence, pool):
            return super().prompt_kind(recurrence, pool)
        return partial(CpuPrefillContext, programs=self.prompts)

    def other_forms(self) -> list[AbstractContextManager[None]]:
        forms = [self.prompts.none()]
        return [*forms, self._long_on_threads()] if num_threads() > 1 else forms

    @contextmanager
    def _long_on_threads(self) -> Iterator[None]:
        with self.prompts.none(), parallel_forms():
            yield

    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        return CpuCandidates(roots, topk)

    def token_logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """A long row alone torch would add up in parts, one per thread: so it is never alone."""
        if len(logits) != 1:
            return super().token_logprobs(logits, tokens, top)
        twice = super().token_logprobs(logits.expand(2, -1), tokens, top)
        return TokenLogprobs(*(part[:1] for part in twice))

    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        return _top(cpu_top.top_log_probs, logits.float(), k)

    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        return _top(cpu_top.best, log_probs, k)

    def best_of(self, scores: Tensor) -> Tensor:
        if scores.dtype != torch.float32 or scores.shape[-1] == 0:
            return super().best_of(scores)
        tokens, scores = torch.empty(scores.shape[:-1], dtype=torch.int64), scores.contiguous()
        rows, size = tokens.numel(), scores.shape[-1]
        work = rows * size // SCORES_PER_NS
        BEST_OF(rows, work, BestOf(scores.data_ptr(), size, tokens.data_ptr()))
        return tokens

    def accept_tokens(
        self, table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
    ) -> Truncated:
        accepted = empty_truncated(len(slots), max_depth, self.device)
        inputs = (tree.tokens, tree.parents, target, table.stop_tokens, table.remaining, slots)
        accept.accept_and_truncate(*(part.numpy() for part in (*inputs, *accepted)))
        return accepted

    def commit_tokens(
        self, table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
    ) -> None:
        changed = (table.kv_slots, table.processed, table.last_token, table.remaining)
        accept.commit(*(part.numpy() for part in (slots, kv_slots, *accepted, *changed)))

    def step_program(
        self, target: Network, kv: KVPool, table: RequestTable, scheme: StateScheme, adapted: bool
    ) -> StepProgram | None:
        if not isinstance(scheme, CpuDeferred) or not scheme.has_journal:
            return None
        return target_program(target, kv, table, scheme, adapted)

    def greedy_drafting(
        self, head: Network, pools: DraftPools, scheme: StateScheme
    ) -> GreedyDrafting | None:
        program = draft_program(head, pools, scheme)
        return None if program is None else program.trees

    def enter_roots(self, table: RequestTable, slots: Tensor, kv_slots: Tensor) -> None:
        requests, columns = table.kv_slots.shape
        b, nodes = kv_slots.shape
        given = EnterRoots(T=nodes, R=requests, columns=columns)
        given.point(slots=slots, kv_slots=kv_slots, table=table.kv_slots, processed=table.processed)
        ENTER_ROOTS(b, 0, given)

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        out = torch.empty_like(logits) if len(rows) == len(logits) else logits.clone()
        token_mask.mask_logits(*(part.numpy() for part in (logits, rows, masks, out)))
        return out

    def pending_entries(self, table: RequestTable, size: PendingSize) -> PendingEntries:
        return CpuPendingEntries(table, size)


def _has_kernels(config: RecurrenceConfig | None, pool: StatePool) -> bool:
    known = isinstance(config, Mamba2Config | DeltaConfig | None)
    by_channel = isinstance(config, DeltaConfig) and config.channel_decay
    return known and not by_channel and pool.ssm.dtype == torch.float32


def _top(kernel: Callable[..., None], rows: Tensor, k: int) -> TopTokens:
    shape = (rows.shape[0], k)
    top = TopTokens(torch.empty(shape), torch.empty(shape, dtype=torch.int64))
    kernel(rows.contiguous().numpy(), *(part.numpy() for part in top))
    return top
