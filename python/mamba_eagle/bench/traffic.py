"""The bytes that a decode step has to read, and how near to the device's limit it comes.

A step reads every weight once, the recurrent state of each request, and the keys and values of its
tokens so far. Any engine moves that much, so engines can be compared by it. States that a scheme
writes, rows, activations and everything that drafting reads are left out; they lower the share.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import kv_dtype
from mamba_eagle.layers.moe import Experts
from mamba_eagle.layers.weights import matrix_layers
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.loader import created_as
from mamba_eagle.models.registry import model_class
from mamba_eagle.quantization.policy import Policy
from mamba_eagle.runner.memory import kv_slot_bytes, state_bytes


class StepBytes(NamedTuple):
    """The least that one step reads."""

    weights: float
    states: float
    kv: float

    @property
    def total(self) -> float:
        return sum(self)

    def share(self, seconds: float, copy_tb_s: float) -> float:
        """Time for these bytes at the device's own copy rate, as a fraction of ``seconds``."""
        return self.total / (copy_tb_s * 1e12) / seconds


class StepSize(NamedTuple):
    batch: int
    nodes: int  # of each request; 1: plain decoding
    position: float  # mean number of tokens before the step
    experts: float = 0.0  # per layer that its tokens go to; 0: as many as independent tokens reach


class FewBits(NamedTuple):
    """What has fewer bits than the model's dtype."""

    weights: Policy = Policy()
    kv_cache_dtype: str = "auto"  # as in --kv-cache-dtype


def step_bytes(
    model: ModelConfig,
    size: StepSize,
    dtype: str,
    ssm_dtype: str,
    few_bits: FewBits = FewBits(),  # noqa: B008 (immutable)
) -> StepBytes:
    """weights: as ``weight_bytes``. states: batch · (layers · H·P·N and the convolution's history).
    kv: batch · position · 2 · layers · kv_heads · head_dim. Dtypes by torch's names."""
    itemsize, ssm_itemsize = (getattr(torch, name).itemsize for name in (dtype, ssm_dtype))
    kv_itemsize = kv_dtype(few_bits.kv_cache_dtype, getattr(torch, dtype)).itemsize
    return StepBytes(
        weight_bytes(model, dtype, size.batch * size.nodes, few_bits.weights, size.experts),
        size.batch * state_bytes(model, ssm_itemsize, itemsize),
        size.batch * size.position * kv_slot_bytes(model, kv_itemsize),
    )


def weight_bytes(
    model: ModelConfig,
    dtype: str,
    tokens: int,
    policy: Policy = Policy(),  # noqa: B008 (immutable)
    touched: float = 0.0,
) -> float:
    """All parameters except those that are only looked up: an embedding that is not also the
    lm_head counts one row per token, of E experts those count that are ``touched`` in a layer; 0:
    E (1 - (1 - top_k / E)^tokens), if tokens choose independently."""
    kind = getattr(torch, dtype)
    with created_as(kind, torch.device("meta")):
        made = model_class(model)(model)
    few = few_bit_weights(made, policy)

    def size_of(weights: Iterable[Tensor]) -> float:
        return sum(w.numel() * few.get(id(w), 8 * w.itemsize) / 8 for w in weights)

    total = size_of(made.parameters())
    if not model.tie_word_embeddings:
        unread = model.vocab_size - min(tokens, model.vocab_size)
        total -= unread * model.hidden_size * kind.itemsize
    if model.moe is not None:
        experts = size_of(
            p for m in made.modules() if isinstance(m, Experts) for p in m.parameters()
        )
        missed = (1 - model.moe.top_k / model.moe.num_experts) ** tokens
        total -= experts * (1 - touched / model.moe.num_experts if touched else missed)
    return total


def few_bit_weights(model: nn.Module, policy: Policy) -> dict[int, int]:
    """The bits of the parameters that ``policy`` rounds, by ``id``. Scales are left out."""
    found = {}
    for name, layer in matrix_layers(model):
        for leaf in layer.matrix_names:
            weight = getattr(layer, leaf)
            bits = policy.bits(f"{name}.{leaf}", weight)
            if bits is not None:
                found[id(weight)] = bits
    return found
