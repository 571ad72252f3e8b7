"""The EAGLE draft head (EAGLE-1/2: arXiv 2401.15077, 2406.16858) for any target we load."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.layers.block import make_blocks
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import ModelConfig


class EagleHead(Layer):
    """Predicts the target's next hidden state from a token and the hidden state before it.

    The entry of position p takes the embedding of token p and the target's hidden state (after
    its final norm) at p-1, zeros for p = 0, and gives a guess of the hidden state at p; the
    target's own lm_head turns that into logits for token p+1. With the entry of p depending on
    tokens up to p only, the head's KV can live in the slots of the target's prefix cache.
    Embedding and lm_head are the target's and are not stored with the head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=True)
        self.layers = make_blocks(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, embeddings: Tensor, features: Tensor, ctx: ForwardContext) -> Tensor:
        """embeddings, features [n, hidden_size] -> predicted features [n, hidden_size]."""
        hidden = self.fc(torch.cat([embeddings, features], dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, ctx)
        return self.norm(hidden)
