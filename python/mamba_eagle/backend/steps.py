"""What a backend needs to know to run the target's part of a step in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.models.base import CausalLM
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class ModelParts(NamedTuple):
    """A model that is ``logits(norm(layers(embedding · scale))) · logits_scale``, and whose
    features are what ``logits`` reads."""

    embedding: Embedding
    scale: float
    layers: Sequence[nn.Module]
    norm: RMSNorm
    logits: Linear
    logits_scale: float


def model_parts(model: CausalLM) -> ModelParts | None:
    """None: the model does more than that, or is one of several stages."""
    whole = model.config.is_first_stage and model.config.is_last_stage
    if not whole or model.reads_embeddings or model.rotary is not None or model.tap_layers:
        return None
    own, scale = model.parts, model.embedding_scale
    return ModelParts(own.embedding, scale, own.layers, own.norm, model.lm_head, model.logits_scale)


class Passed(NamedTuple):
    """The target's outputs for b trees of T nodes."""

    layout: Any  # as returned by the state scheme's ``begin``
    positions: Tensor  # [b, T] int64
    features: Tensor  # [b, T, F]
    logits: Tensor  # [b, T, V] float32


class TargetPass(Protocol):
    """Verifies trees and commits what is accepted, with the results of the scheme, the layers and
    ``Backend.accept_tokens``. slots [b] request slots; kv_slots [b, T] of the nodes."""

    def verify(self, slots: Tensor, kv_slots: Tensor, tree: Tree) -> Passed:
        """Valid until the next step."""

    def commit(
        self, slots: Tensor, kv_slots: Tensor, tree: Tree, features: Tensor, target: Tensor,
        max_depth: int,
    ) -> tuple[Truncated, Tensor]:  # fmt: skip
        """After ``verify`` of the same trees; target [b, T]. Returns the accepted paths and the
        positions of the states [b]."""
