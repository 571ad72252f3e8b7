"""Olmo-Hybrid: gated DeltaNet layers with beta up to 2, and attention layers with norms of what
they add instead of what they read."""

from dataclasses import replace
from typing import Any

from mamba_eagle.layers.block import LayerNames, PreNormLayer, ResidualLayer
from mamba_eagle.layers.delta_rule import GatedDeltaNet
from mamba_eagle.layers.gated_norm import HeadNormThenGate
from mamba_eagle.layers.layer import Residual, Total
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mlp import GatedMLP
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.recurrent import JoinedConv
from mamba_eagle.layers.rotary import WholeNormAttention
from mamba_eagle.model_config import DeltaConfig, ModelConfig, WholeNorm
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.parse import attention_config, blocks_of, model_config, only
from mamba_eagle.models.qwen3_next import BLOCK_OF_NAME
from mamba_eagle.parallel.cut import Cut, columns, rows
from mamba_eagle.parallel.shard import Shard, recurrent_heads

# published name -> ours
NAMES = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".q_conv1d.": ".conv1d.q.",
    ".k_conv1d.": ".conv1d.k.",
    ".v_conv1d.": ".conv1d.v.",
}
GATED_NORM_EPS = 1e-5  # whatever config.json says


class OlmoDeltaNet(GatedDeltaNet):
    def __init__(self, config: DeltaConfig, hidden_size: int, index: int, _: float) -> None:
        super().__init__(config, index)
        c = config
        self.q_proj = Linear(hidden_size, c.key_size)
        self.k_proj = Linear(hidden_size, c.key_size)
        self.v_proj = Linear(hidden_size, c.inner_size)
        self.g_proj = Linear(hidden_size, c.inner_size)
        self.a_proj = Linear(hidden_size, c.num_heads)
        self.b_proj = Linear(hidden_size, c.num_heads)
        self.o_norm = HeadNormThenGate(c.head_dim, GATED_NORM_EPS)
        self.o_proj = Linear(c.inner_size, hidden_size)

    def make_conv(self) -> JoinedConv:
        c = self.config
        widths = {"q": c.key_size, "k": c.key_size, "v": c.inner_size}
        return JoinedConv(widths, c.conv_kernel)

    def projections(self) -> dict[str, list[Linear]]:
        return {
            "channels": [self.q_proj, self.k_proj, self.v_proj, self.g_proj],
            "gates": [self.a_proj, self.b_proj],
        }

    @property
    def ends(self) -> tuple[HeadNormThenGate, Linear]:
        return self.o_norm, self.o_proj

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        c, own = self.config, recurrent_heads(shard, self.config)
        keys, values = rows(*own.group_channels(c.state_size)), rows(own.channels(c.head_dim))
        keyed = ("q_proj.weight", "k_proj.weight", "conv1d.q.weight", "conv1d.k.weight")
        valued = ("v_proj.weight", "g_proj.weight", "conv1d.v.weight")
        each = ("a_proj.weight", "b_proj.weight", "dt_bias", "A_log")
        return {
            **dict.fromkeys(keyed, keys),
            **dict.fromkeys(valued, values),
            **dict.fromkeys(each, rows(own.heads)),
            "o_proj.weight": columns(own.channels(c.head_dim), zero=own.idle),
        }


class OlmoDeltaLayer(PreNormLayer):
    names = LayerNames(recurrent="linear_attn")
    recurrent = OlmoDeltaNet
    in_programs = True


class OlmoAttentionLayer(ResidualLayer):
    in_programs = True

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        assert config.attention is not None
        index = config.places_before(layer, "attention")
        self.self_attn = WholeNormAttention(config.attention, size, index, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.total = Total()

    def steps(self) -> tuple[Residual, ...]:
        mlp = (self.mlp, self.total)
        return (
            Residual(None, self.self_attn, self.total, after=self.post_attention_layernorm),
            Residual(None, *mlp, takes_context=False, after=self.post_feedforward_layernorm),
        )


class OlmoHybridForCausalLM(CausalLM):
    renamed = NAMES

    def __init__(self, config: ModelConfig) -> None:
        kinds = {"recurrent": OlmoDeltaLayer, "attention": OlmoAttentionLayer}
        super().__init__(config, [kinds[kind](config, i) for i, kind in enumerate(config.blocks)])


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Raises: UnsupportedModel, KeyError naming what config.json lacks."""
    only(values, hidden_act="silu", attention_bias=False)
    count, heads = values["num_hidden_layers"], values["num_attention_heads"]
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
        if "full_attention" not in kinds:
            kinds[-1] = "full_attention"
    key_heads = values.get("linear_num_key_heads") or heads
    key_dim = values.get("linear_key_head_dim") or int(0.75 * values["hidden_size"] / key_heads)
    given = values.get("rope_parameters") or {}
    # the published models do not
    rotates = given.get("rope_theta") or values.get("rope_theta")
    attention = attention_config(values, rotated=1.0 if rotates else None)
    heads, keys = attention.num_heads, attention.num_kv_heads
    norms = (WholeNorm(heads, (1,) * heads), WholeNorm(keys, (1,) * keys))
    return model_config(
        values,
        blocks_of(values, kinds, BLOCK_OF_NAME),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        recurrence=DeltaConfig(
            num_heads=values.get("linear_num_value_heads") or heads,
            head_dim=values.get("linear_value_head_dim") or 2 * key_dim,
            state_size=key_dim,
            num_groups=key_heads,
            conv_kernel=values.get("linear_conv_kernel_dim", 4),
            max_beta=2.0 if values.get("linear_allow_neg_eigval", True) else 1.0,
        ),
        attention=replace(attention, whole_norms=norms),
        mlp_bias=False,
    )
