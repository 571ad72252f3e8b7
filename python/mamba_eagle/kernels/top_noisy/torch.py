"""Log-probabilities of a sample whose noise is known, in torch.

Shapes: b requests, R request slots, V vocabulary, V' of it that a drafter knows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-6  # the lowest temperature that logits are divided by


class NoiseKeys(NamedTuple):
    """What the noise of b tokens depends on, and how much of it there is."""

    slots: Tensor  # [b] int64, request slots
    positions: Tensor  # [b] int64, of the tokens
    temperatures: Tensor  # [R] float32, with any stride
    seeds: Tensor  # [R] int64, with any stride
    vocab_size: int  # V


def whole_log_probs(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Log-probabilities of all V tokens: logits [..., V'], any float dtype -> [..., V] float32.

    ids: [V'] int64, the target's token of each; None: V' is V. -inf for tokens that are not there.
    """
    own = logits.float().log_softmax(-1)
    if ids is None:
        return own
    whole = own.new_full((*own.shape[:-1], vocab_size), float("-inf"))
    whole[..., ids] = own
    return whole


def noisy_log_probs(
    log_probs: Tensor, keys: NoiseKeys, gumbel: Callable[[Tensor, Tensor, int], Tensor]
) -> Tensor:
    """Given the noise, which is the same in all lanes: [b, lanes, V] float32 -> the same."""
    temperature = keys.temperatures[keys.slots][:, None, None]
    seeds = keys.seeds[keys.slots]
    noise = gumbel(seeds, keys.positions, log_probs.shape[-1])[:, None]
    noisy = (log_probs / temperature.clamp(min=COLDEST) + noise).log_softmax(-1)
    return torch.where(temperature > 0, noisy, log_probs)


def noisy_scores(
    logits: Tensor,
    columns: Tensor | slice,
    keys: NoiseKeys,
    gumbel: Callable[[Tensor, Tensor, int], Tensor],
) -> Tensor:
    """``logits / temperature + noise`` of some tokens: logits [b, lanes, V'] float32 -> the same.
    columns: the target's tokens that these are."""
    temperature = keys.temperatures[keys.slots][:, None, None]
    seeds = keys.seeds[keys.slots]
    noise = gumbel(seeds, keys.positions, keys.vocab_size)[:, columns][:, None]
    noisy = logits / temperature.clamp(min=COLDEST) + noise
    return torch.where(temperature > 0, noisy, logits)
