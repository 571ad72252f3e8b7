"""What all families share: embedding, layers, norm, lm_head, and how weights find their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.model_config import ModelConfig


class Target(NamedTuple):
    """Where a checkpoint's tensor goes: a parameter, or one slice of a stacked one."""

    name: str
    index: int | None = None
    scale: float | Tensor = 1.0  # multiplied into it, in float32


class Parts(NamedTuple):
    """A model's modules by what they are, whatever they are called."""

    embedding: Embedding
    layers: tuple[nn.Module, ...]
    norm: RMSNorm


class CausalLM(Layer):
    """A decoder with a language-model head; parameters bear the names that the family publishes.

    A family gives its layers, the three names below, and ``target`` where a checkpoint's tensors
    are laid out otherwise than ours. Multipliers and RoPE are attributes it may set.
    """

    backbone_name = "model"
    embedding_name = "embed_tokens"
    norm_name = "norm"

    def __init__(self, config: ModelConfig, layers: list[nn.Module]) -> None:
        super().__init__()
        self.config = config
        backbone = Layer()
        embedding = Embedding(config.vocab_size, config.hidden_size)
        norm = RMSNorm(config.hidden_size, config.norm_eps)
        setattr(backbone, self.embedding_name, embedding)
        backbone.layers = nn.ModuleList(layers)
        setattr(backbone, self.norm_name, norm)
        setattr(self, self.backbone_name, backbone)
        self.parts = Parts(embedding, tuple(layers), norm)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight
        rope = config.attention.rope if config.attention else None
        self.rotary = Rotary(rope) if rope else None
        self.embedding_scale = 1.0
        self.logits_scale = 1.0
        self.tap_layers: tuple[int, ...] = ()
        self._tapped: list[Tensor] = []

    def embed(self, input_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        embedded = self.parts.embedding(input_ids)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def tap(self, layers: tuple[int, ...]) -> None:
        """From now on ``forward`` also returns what goes into these layers (the number of layers:
        into the final norm). Rising; once."""
        self.tap_layers = layers
        places = (*self.parts.layers, self.parts.norm)
        for layer in layers:
            places[layer].forward = self._keeping(places[layer].forward)

    def _keeping(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # a layer has no hooks: its call is its ``forward``
        def kept(hidden: Tensor, *others: Any) -> Tensor:
            self._tapped.append(hidden)
            return forward(hidden, *others)

        return kept

    @property
    def feature_size(self) -> int:
        """Columns of what ``forward`` returns."""
        return self.config.hidden_size * (1 + len(self.tap_layers))

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """input_ids [n] int64 -> features [n, feature_size]: hidden states after the final norm,
        and beside them those that are tapped."""
        hidden = self.embed(input_ids)
        if self.rotary is not None:
            ctx.rotation = self.rotary(ctx.positions, hidden.device)
        normed = self.parts.norm(self.run_layers(hidden, ctx))
        if not self.tap_layers:
            return normed
        features = torch.cat([normed, *self._tapped], dim=-1)
        self._tapped.clear()
        return features

    def run_layers(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        for layer in self.parts.layers:
            hidden = layer(hidden, ctx)
        return hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden_size or features] -> [n, vocab_size], float32. out: where they go, if not to
        new memory."""
        logits = self.lm_head(hidden[..., : self.config.hidden_size])
        logits = logits.float() if out is None else out.copy_(logits)
        scale = self.logits_scale
        return logits if scale == 1.0 else torch.mul(logits, scale, out=out)

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """``compute_logits`` in the dtype of ``hidden`` where that loses nothing, for who reads
        them once."""
        if self.logits_scale != 1.0:
            return self.compute_logits(hidden)
        return self.lm_head(hidden[..., : self.config.hidden_size])

    def target(self, name: str) -> Target | None:
        """Where a checkpoint's tensor of this name goes; None: it is not needed."""
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return None
        if name.endswith("rotary_emb.inv_freq"):  # older checkpoints have what config.json implies
            return None
        return Target(name)
