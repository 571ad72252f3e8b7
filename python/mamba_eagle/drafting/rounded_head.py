"""The target's lm_head for drafts, in a drafter's fewer bits.

Half of what a depth of an EAGLE head reads is the target's lm_head. A copy of it in eight bits
changes which tokens are drafted, rarely, and no text.
"""

from mamba_eagle.config import ON_A_CPU
from mamba_eagle.drafting.base import DraftParts
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.products import PackedMatrix
from mamba_eagle.quantization.grouped import GROUP, GroupedMatrix, int8_groups

ROWS_AT_ONCE = 8192  # that are in memory as float32


def rounded_head(parts: DraftParts) -> Linear | None:
    """None: drafts read the target's own, as the drafter's weights have no fewer bits, or ranks
    share the vocabulary."""
    config, head = parts.config, parts.target.lm_head
    mode, weight = config.speculative_draft_model_quantization, head.matrix
    if mode not in ON_A_CPU or parts.group.size > 1 or head.bias is not None:
        return None
    if not isinstance(weight, PackedMatrix) or weight.few_bits or weight.shape[1] % GROUP:
        return None
    outputs = weight.shape[0]
    rounded = GroupedMatrix.join(
        [
            int8_groups(weight.narrow(-2, begin, min(ROWS_AT_ONCE, outputs - begin)).dequantize())
            for begin in range(0, outputs, ROWS_AT_ONCE)
        ]
    )
    assert rounded is not None
    own = Linear.of(rounded, head.weight.dtype)
    own.prepare(parts.backend.layer_ops)
    return own
