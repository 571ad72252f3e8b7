"""Granite 4.0 H: Mamba2 with a few attention layers, routed and shared experts in each layer, and
four multipliers instead of MuP."""

from typing import Any

from torch import Tensor

from mamba_eagle.layers.block import LayerNames, PreNormLayer
from mamba_eagle.layers.layer import Residual
from mamba_eagle.layers.mlp import PackedGatedMLP
from mamba_eagle.layers.moe import GatedMoE
from mamba_eagle.model_config import ModelConfig, MoEConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.parse import MAMBA_NAMES, attention_config, mamba_config, model_config, only

# published name -> ours
NAMES = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}


class GraniteLayer(PreNormLayer):
    names = LayerNames(mlp="shared_mlp")

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.residual_multiplier = float(config.raw.get("residual_multiplier", 1.0))
        self.in_programs = config.moe is None
        if config.moe is not None:
            self.block_sparse_moe = GatedMoE(config.moe, config.hidden_size)

    def new_mlp(self, config: ModelConfig, layer: int) -> PackedGatedMLP:
        return PackedGatedMLP(config.hidden_size, config.intermediate_size)

    def steps(self) -> tuple[Residual, ...]:
        mixer, mlp = (s._replace(scale=self.residual_multiplier) for s in super().steps())
        return mixer, mlp if self.in_programs else mlp._replace(body=self.both)

    def both(self, normed: Tensor) -> Tensor:
        """Shared and routed experts."""
        made: Tensor = self.parts.mlp(normed) + self.block_sparse_moe(normed)
        return made


class GraniteMoeHybridForCausalLM(CausalLM):
    layer_class = GraniteLayer
    renamed = NAMES

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = float(config.raw.get("embedding_multiplier", 1.0))
        self.logits_scale = 1.0 / float(config.raw.get("logits_scaling", 1.0))


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu")
    kinds = values.get("layer_types") or values.get("layers_block_type")
    kinds = kinds or ["mamba"] * values["num_hidden_layers"]
    blocks = tuple("recurrent" if kind in MAMBA_NAMES else "attention" for kind in kinds)
    attention = None
    if "attention" in blocks:
        rotated = 1.0 if values.get("position_embedding_type") == "rope" else None
        scale = float(values.get("attention_multiplier", 1.0))
        attention = attention_config(values, rotated, scale=scale)
    moe = None
    if values.get("num_local_experts"):
        moe = MoEConfig(
            num_experts=values["num_local_experts"],
            top_k=values["num_experts_per_tok"],
            intermediate_size=values["intermediate_size"],
        )
    mamba = mamba_config(values) if "recurrent" in blocks else None
    return model_config(
        values,
        blocks,
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        recurrence=mamba,
        attention=attention,
        moe=moe,
        intermediate_size=values.get("shared_intermediate_size", 1024),
    )
