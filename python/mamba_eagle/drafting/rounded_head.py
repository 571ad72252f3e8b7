"""The target's lm_head for drafts, in a drafter's fewer bits.

Half of what a depth of an EAGLE head reads is the target's lm_head, and nearly all with a large
vocabulary. A copy of it in eight or four bits changes which tokens are drafted, rarely, and no
text.
"""

from collections.abc import Callable

from mamba_eagle.config import ON_A_CPU
from mamba_eagle.drafting.base import DraftParts
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.products import PackedMatrix
from mamba_eagle.quantization.grouped import GROUP, int4_groups, int8_groups
from mamba_eagle.quantization.matrix import Matrix, quantized

ROWS_AT_ONCE = 8192  # that are in memory as float32


def rounded_head(parts: DraftParts) -> Linear | None:
    """In integers on a CPU if the drafter's weights are, in float8 where the device multiplies it.
    None: drafts read the target's own, as they do if its bits are few, ranks share the vocabulary,
    logits are scaled, or the drafter's weights are to keep their bits."""
    target, mode = parts.target, parts.config.speculative_draft_model_quantization
    head = target.lm_head
    stored = head.matrix
    if parts.group.size > 1 or head.bias is not None or target.logits_scale != 1.0:
        return None
    if mode in ON_A_CPU and isinstance(stored, PackedMatrix):
        if stored.few_bits or stored.shape[1] % GROUP:
            return None
        in_groups = int8_groups if mode == "int8" else int4_groups
        return _prepared(
            parts, lambda begin, rows: in_groups(stored.narrow(-2, begin, rows).dequantize())
        )
    if stored is not None or mode == "none":
        return None
    weight = head.weight.detach()
    if not parts.backend.layer_ops.keeps(quantized(weight[:1]), weight.device):
        return None
    return _prepared(parts, lambda begin, rows: quantized(weight.narrow(-2, begin, rows)))


def _prepared(parts: DraftParts, rounded: Callable[[int, int], Matrix]) -> Linear:
    """rounded: begin, number -> these rows of lm_head."""
    outputs, dtype = parts.target.lm_head.weight.shape[0], parts.target.lm_head.weight.dtype
    pieces = [
        rounded(begin, min(ROWS_AT_ONCE, outputs - begin))
        for begin in range(0, outputs, ROWS_AT_ONCE)
    ]
    whole = type(pieces[0]).join(pieces)
    assert whole is not None
    own = Linear.of(whole, dtype)
    own.prepare(parts.backend.layer_ops)
    return own
