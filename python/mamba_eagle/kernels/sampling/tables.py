"""What the sampler's kernels read: parameters by request slot, and the nodes of a step."""

from typing import NamedTuple, get_type_hints

from torch import Tensor

from mamba_eagle.core import SamplingParams

# The columns of ``SamplingTables.numbers``: all parameters that are declared as floats.
NUMBERS = tuple(name for name, kind in get_type_hints(SamplingParams).items() if kind is float)
INTEGERS = ("seed", "top_k", "ban_until")  # of ``SamplingTables.integers``
# What a request may ask for: bit i of its flags is set if parameter i changes its tokens. Without
# noise (the temperature) no filter does.
PARAMETERS = (*NUMBERS, "top_k", "logit_bias", "min_new_tokens")
MASS = 2.0**40  # of a node's best token, in the integer sums of top-p


class SamplingTables(NamedTuple):
    """By request slot; R of them, V tokens. The addresses never change: graphs hold them."""

    flags: Tensor  # [R] int32, bits of PARAMETERS
    numbers: Tensor  # [R, NUMBERS] float32; in the column of min_p, temperature · log(min_p)
    integers: Tensor  # [R, INTEGERS] int64; ban_until: where the first stop token may come
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
