"""Nemotron-H: Mamba2, attention without position encoding, and relu² MLP layers, mixed."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.layers.block import make_blocks
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.models.config import ModelConfig


class NemotronHBackbone(Layer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.layers = make_blocks(config)
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps)


class NemotronHForCausalLM(Layer):
    """Parameter names are those of the published checkpoints (``backbone.layers.N.mixer…``)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = NemotronHBackbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """input_ids [n] int64 -> hidden states after the final norm, [n, hidden_size]."""
        hidden = self.embed(input_ids)
        for layer in self.backbone.layers:
            hidden = layer(hidden, ctx)
        return self.backbone.norm_f(hidden)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        return self.backbone.embeddings(input_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], float32."""
        return self.lm_head(hidden).float()
