"""Multi-token prediction (arXiv 2404.19737; with modules in sequence: arXiv 2412.19437).

There is either one module, which is run on its own output for each further token (Nemotron 3), or
one module for each of K tokens. A module consists of a few Nemotron-H blocks. The arithmetic and
its order follow Megatron-LM (``core/transformer/multi_token_prediction.py``), the names NVIDIA's
checkpoints as read by vLLM and SGLang (``nemotron_h_mtp.py`` of each).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block import Block
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import ModelConfig, UnsupportedModel
from mamba_eagle.models import nemotron_h
from mamba_eagle.models.base import Target

DEFAULT_BLOCKS = ("attention", "moe")  # if config.json names modules but no blocks


class MtpBlock(Block):
    """A block of a module; the first and the last one of a module have a few layers more."""

    enorm: RMSNorm  # first: norm of the embedding
    hnorm: RMSNorm  # first: norm of the hidden state
    eh_proj: Linear  # first: both, side by side, to hidden_size
    final_layernorm: RMSNorm  # last: norm of the module's output


class MtpHead(Layer):
    """Entry p of module j reads token p and the output of module j-1 at p-1, and predicts token
    p+1. Module 0 reads the target's hidden state at p-1, after its final norm instead; what module
    j sees of the target therefore ends j tokens earlier.

    The blocks of all modules are in one list, and attention and Mamba2 layers are numbered
    consecutively through it. Embedding and ``lm_head`` are the target's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_modules = num_modules(config)
        size, eps = config.hidden_size, config.norm_eps
        blocks = [MtpBlock(config, layer) for layer in range(len(config.blocks))]
        self.length = len(blocks) // self.num_modules
        for first in blocks[:: self.length]:
            first.enorm = RMSNorm(size, eps)
            first.hnorm = RMSNorm(size, eps)
            first.eh_proj = Linear(2 * size, size)
        for last in blocks[self.length - 1 :: self.length]:
            last.final_layernorm = RMSNorm(size, eps)
        self.mtp = Layer()
        self.mtp.layers = nn.ModuleList(blocks)
        self._modules_of_blocks = [
            blocks[at : at + self.length] for at in range(0, len(blocks), self.length)
        ]

    def forward(
        self, module: int, embeddings: Tensor, hidden: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """embeddings, hidden [n, hidden_size] -> the module's output [n, hidden_size], which the
        target's ``lm_head`` reads and the next module, or the module itself if it is the only
        one."""
        blocks = self._modules_of_blocks[module]
        first, last = blocks[0], blocks[-1]
        hidden = first.eh_proj(torch.cat([first.enorm(embeddings), first.hnorm(hidden)], dim=-1))
        for block in blocks:
            hidden = block(hidden, ctx)
        return last.final_layernorm(hidden)

    def target(self, name: str) -> Target | None:
        """Where a checkpoint's tensor goes; None for the target's, often in the same folder."""
        if not name.startswith("mtp."):
            return None
        return nemotron_h.expert_place(name) or Target(name)

    def published_weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name; each expert is stored separately."""
        weights = {}
        for name, value in self.state_dict().items():
            if name.endswith((".experts.up_proj", ".experts.down_proj")):
                stem, _, projection = name.rpartition(".")
                for i, expert in enumerate(value):
                    weights[f"{stem}.{i}.{projection}.weight"] = expert
            else:
                weights[name] = value
        return weights


# ── config.json ──


def num_modules(config: ModelConfig) -> int:
    return config.raw["num_nextn_predict_layers"]


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """The modules' blocks, from the target's config.json or from one with the same keys.

    There are ``num_nextn_predict_layers`` modules with the blocks of ``mtp_layers_block_type`` or,
    where that is missing or says no more than the default, ``mtp_hybrid_override_pattern``. With
    ``mtp_use_repeated_layer`` that number counts the uses of a single module.

    Raises: UnsupportedModel
    """
    count = int(values.get("num_nextn_predict_layers") or 0)
    if count < 1:
        raise UnsupportedModel(
            f"num_nextn_predict_layers is {values.get('num_nextn_predict_layers')}: "
            "the model has no multi-token-prediction modules"
        )
    if values.get("mtp_use_repeated_layer"):
        count = 1
    names = list(values.get("mtp_layers_block_type") or DEFAULT_BLOCKS)
    pattern = values.get("mtp_hybrid_override_pattern")
    default = [nemotron_h.BLOCK_OF_NAME.get(n, n) for n in names] == list(DEFAULT_BLOCKS)
    return nemotron_h.parse_config(
        {
            **values,
            "layers_block_type": None if pattern and default else names * count,
            "layer_types": None,
            "hybrid_override_pattern": pattern and pattern * count,
            "num_nextn_predict_layers": count,
        }
    )


def stored_modules(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """``config``, or the config of its first module if a checkpoint's ``names`` contain no other.

    Some exporters counted the uses of a repeated module as modules and wrote no
    ``mtp_use_repeated_layer`` (NVIDIA-NeMo/Megatron-Bridge#5946).
    """
    length = len(config.blocks) // num_modules(config)
    stored = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
    if stored != {str(i) for i in range(length)}:
        return config
    raw = {**config.raw, "num_nextn_predict_layers": 1}
    return replace(config, blocks=config.blocks[:length], raw=raw)
