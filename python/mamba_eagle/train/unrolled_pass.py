"""The unrolled pass: what a head outputs at every depth of every draft, for whole answers at once.

While drafting, only the first token after a verify step is predicted from the target's own hidden
states; every later one is predicted from the head's previous output. Training does the same: depth
0 reads the target's features, depth j reads the head's outputs at depth j - 1 (HASS, arXiv
2408.15766; the "training-time test" of EAGLE-3, arXiv 2503.01840).
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.train.unrolled_context import UnrolledContext, shift


class Begun(NamedTuple):
    """Depth 0 of an unrolled pass."""

    outputs: Tensor  # [b, l, O]
    context: UnrolledContext


def begin(network: DraftNetwork, tokens: Tensor, features: Tensor) -> Begun:
    """Runs the true entries as ``DraftNetwork.chain`` does: tokens [b, l], features [b, l, W]."""
    batch, length = tokens.shape
    context = UnrolledContext(batch, length, tokens.device)
    given = network.entry_features(features.flatten(0, 1)).unflatten(0, tokens.shape)
    carry = given.new_zeros(len(tokens), network.carry_size)
    return Begun(network.run_entries(tokens, shift(given, 1), carry, context), context)


def unroll(network: DraftNetwork, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
    """Yields the outputs [b, l, O] of each depth below ``depth``.

    At depth j, entry p is the draft token j places after its root and predicts token p + 1; the
    first j entries are meaningless.

    Args:
        tokens: [b, l].
        features: [b, l, W], the target's at these tokens.
    """
    outputs, context = begin(network, tokens, features)
    yield outputs
    for j in range(1, depth):
        above = shift(outputs, 1).flatten(0, 1)
        outputs = network.lanes(j, tokens.flatten(), above, context)
        outputs = outputs.unflatten(0, tokens.shape)
        yield outputs
