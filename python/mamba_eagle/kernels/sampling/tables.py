"""What the sampler's kernels read: parameters by request slot, and the nodes of a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# What a request asks for: bits of ``SamplingTables.flags``.
NOISE = 1  # temperature above 0; without it no filter matters
TOP_K = 2
TOP_P = 4
MIN_P = 8
HISTORY = 16  # a penalty
BIAS = 32
BAN = 64  # stop tokens wait for min_new_tokens


class SamplingTables(NamedTuple):
    """By request slot; R of them, V tokens. The addresses never change: graphs hold them."""

    flags: Tensor  # [R] int32
    # [R, 6] float32: temperature, top_p, min_p, repetition, frequency, presence
    numbers: Tensor
    spans: Tensor  # [R] float32: temperature · log(min_p)
    integers: Tensor  # [R, 3] int64: seed, top_k, first position at which stop tokens may come
    prompt_seen: Tensor  # [R, V] bool
    output_counts: Tensor  # [R, V] int32
    bias: Tensor  # [R, V] float32
    stops: Tensor  # [R, V] bool


class SampledNodes(NamedTuple):
    """The nodes at which tokens are sampled: b trees of T nodes."""

    slots: Tensor  # [b] int64, request slots
    positions: Tensor  # [b, T] int64, of the sampled tokens
    tokens: Tensor  # [b, T] int64, of the nodes
    ancestors: Tensor  # [b, T, T] bool, each node itself included
