"""The multi-token-prediction layer of Qwen3-Next and its successors: one attention layer of the
target's kind below a projection of embedding and hidden state. Names as read by vLLM
(``qwen3_next_mtp.py``)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block import until_last_sum
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm, keep_exact
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models import qwen3_5
from mamba_eagle.models.base import Target
from mamba_eagle.models.parse import only
from mamba_eagle.models.qwen3_next import QwenLayer, qwen_place


class QwenMtpHead(Layer):
    """Entry p reads token p and the target's hidden state at p-1, after its final norm, or its own
    output there, and predicts token p+1. Embedding and ``lm_head`` are the target's."""

    num_modules = 1

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        assert config.attention is not None and config.attention.rope is not None
        self.config, self.rotary = config, Rotary(config.attention.rope)
        self.mtp: Any = Layer()
        self.mtp.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.mtp.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.mtp.fc = Linear(2 * size, size)
        self.mtp.layers = nn.ModuleList([QwenLayer(config, 0)])
        self.mtp.norm = RMSNorm(size, eps)
        keep_exact(self)

    def forward(
        self, module: int, embeddings: Tensor, hidden: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """embeddings, hidden [n, hidden_size] -> [n, hidden_size], which the target's ``lm_head``
        reads. module: 0."""
        ctx.rotation = self.rotary(ctx.positions, hidden.device)
        own, layer = self.mtp, self.mtp.layers[0]
        both = [own.pre_fc_norm_embedding(embeddings), own.pre_fc_norm_hidden(hidden)]
        hidden = own.fc(torch.cat(both, dim=-1))
        normed, _ = own.norm.after(*until_last_sum([layer], hidden, ctx))
        return normed

    def target(self, name: str) -> Target | None:
        """Where a checkpoint's tensor goes; None for the target's, in the same folder."""
        if not name.startswith("mtp."):
            return None
        return qwen_place(name) or Target(name)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """The layer's, from the target's config.json. Raises: UnsupportedModel."""
    text = qwen3_5.text_values(values)
    only(text, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    config = qwen3_5.parse_config(values)
    own = {"mlp_only_layers": (), "decoder_sparse_step": 1, "num_nextn_predict_layers": 1}
    raw = {**config.raw, **own}
    return replace(config, blocks=("attention",), recurrence=None, raw=raw)
