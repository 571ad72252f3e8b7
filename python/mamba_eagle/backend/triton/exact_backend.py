"""--exact: a token's logits have the same bits however it is served (docs/design/bits.md).

What is replaced is what adds up in an order that depends on what else runs: products, attention and
the recurrence. All else works row by row. Drafters only guess, so what they compute may differ.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention, TreeNodes
from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.backend.token_ops import TokenLogprobs
from mamba_eagle.backend.triton.backend import TritonBackend
from mamba_eagle.backend.triton.exact import ExactJournals, ExactPrefillContext, ExactRows
from mamba_eagle.backend.triton.exact_attention import ExactPrompts, ExactTreeAttention
from mamba_eagle.backend.triton.exact_delta import (
    ExactDeltaJournals,
    ExactDeltaPrefill,
    ExactDeltaRows,
    exact_delta_supported,
)
from mamba_eagle.backend.triton.exact_products import ExactOps
from mamba_eagle.backend.triton.layer import sizes_supported
from mamba_eagle.kernels.top_log_probs.torch import MAX_TOP
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.model_config import ModelConfig, RecurrenceConfig


class ExactBackend(TritonBackend):
    """For models with recurrent layers of Mamba2 or gated DeltaNet, with states in float32."""

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        super().__init__(place, dtype, flashinfer=False)
        self.layer_ops = ExactOps()

    @property
    def description(self) -> str:
        return f"{super().description}, the same bits however a token is served"

    def inexact(self, model: ModelConfig) -> list[str]:
        recurrence, attention = model.recurrence, model.attention
        groups = getattr(recurrence, "norm_groups", None)
        known = (
            recurrence is None or sizes_supported(recurrence) or exact_delta_supported(recurrence)
        )
        wrong = {
            "recurrent layers other than Mamba2's and gated DeltaNet's, or of odd sizes": not known,
            "latent attention": attention is not None and attention.latent is not None,
            "experts in groups": model.moe is not None and model.moe.num_groups > 1,
            "norms that ranks share": groups is not None,
        }
        return [
            f"--exact: {model.model_type} has {what}, whose sums have no fixed order yet; leave "
            "the flag out"
            for what, has in wrong.items()
            if has
        ]

    def scheme_kind(
        self, mode: str, config: RecurrenceConfig, pool: StatePool
    ) -> Callable[..., StateScheme]:
        """mode: deferred, as the settings have seen to."""
        if exact_delta_supported(config):
            return ExactDeltaRows
        return ExactRows if sizes_supported(config) else super().scheme_kind(mode, config, pool)

    def prompt_kind(
        self, recurrence: RecurrenceConfig | None, pool: StatePool
    ) -> Callable[..., PrefillContext]:
        if recurrence is not None and exact_delta_supported(recurrence):
            return ExactDeltaPrefill
        if recurrence is not None and sizes_supported(recurrence):
            return ExactPrefillContext
        return super().prompt_kind(recurrence, pool)

    def tree_attention(self, pool: KVPool, nodes: TreeNodes) -> NewTokenAttention | None:
        return ExactTreeAttention(pool, nodes) if pool.num_layers else None

    def prompt_attention(
        self, pool: KVPool, slot_table: Tensor, parts: Sequence[PrefillPart]
    ) -> NewTokenAttention | None:
        if not pool.num_layers:
            return None
        return ExactPrompts(pool, slot_table, [part.span for part in parts], self.place)

    def journal_kind(self, mixers: Sequence[Recurrent], pool: StatePool) -> type[SavedJournals]:
        if mixers and exact_delta_supported(mixers[0].config):
            return ExactDeltaJournals
        return ExactJournals if pool.ssm.shape[0] else SavedJournals

    def token_logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """Sums and the order of equal ones are the kernel's, which sees one row."""
        logits = logits.float()
        best = self.top_log_probs(logits, MAX_TOP)  # one kernel for any number
        ids = best.tokens.clamp(0, logits.shape[1] - 1)  # where logits are not finite, none is best
        total = logits.gather(1, ids[:, :1]) - best.log_probs[:, :1]
        values = logits.gather(1, ids[:, :top])
        if top > MAX_TOP:
            values, ids = logits.topk(top, dim=-1)
        return TokenLogprobs(logits.gather(1, tokens) - total, values - total, ids[:, :top])
