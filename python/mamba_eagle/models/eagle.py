"""The EAGLE draft head (EAGLE-1 and 2: arXiv 2401.15077, 2406.16858), for targets of any family."""

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block import Block, run_layers
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import ModelConfig


class EagleHead(Layer):
    """Predicts the target's next hidden state from a token and the hidden state before it.

    The entry of position p reads the embedding of token p and the target's hidden state at p-1,
    after its final norm (zeros for p = 0). It predicts the hidden state at p, which the target's
    own lm_head turns into logits for token p+1. The entry depends on tokens up to p only, so the
    head's KV can use the KV slots of the target's prefix cache. Embedding and lm_head are the
    target's and are not stored with the head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=True)
        self.layers = nn.ModuleList(Block(config, i) for i in range(len(config.blocks)))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, embeddings: Tensor, features: Tensor, ctx: ForwardContext) -> Tensor:
        """embeddings, features [n, hidden_size] -> predicted features [n, hidden_size]."""
        hidden = self.fc(torch.cat([embeddings, features], dim=-1))
        return self.norm(run_layers(tuple(self.layers), hidden, ctx))
