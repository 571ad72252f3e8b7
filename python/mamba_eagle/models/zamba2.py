"""Zamba2: Mamba2 layers, some of which also receive the output of a transformer block. One or two
such blocks are shared by all these layers; each use of a block has its own low-rank adapters."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import gate_and_up
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import Mamba2Config, ModelConfig, UnsupportedModel
from mamba_eagle.models.base import CausalLM, Names, Target
from mamba_eagle.models.parse import MAMBA_NAMES, attention_config, model_config
from mamba_eagle.models.rope import rope_config
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard, attention_heads

SHARED = re.compile(r"model\.layers\.(\d+)\.(shared_transformer\..*)")
MIXER_EPS = 1e-5  # epsilon of the Mamba2 norm, whatever config.json says


def gelu(x: Tensor) -> Tensor:
    """A row has the same bits in each batch: torch has one GELU for contiguous tensors on a CPU, as
    a single row is, and another one for halves of rows."""
    return F.gelu(x.contiguous())


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function with this name in config.json. Raises: UnsupportedModel."""
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act {name!r:.200} is not supported; known: {list(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class SharedUse:
    """One use of a shared block; of its attention, what a context sees."""

    number: int  # among the hybrid layers, by which its adapters are named
    index: int  # in the KV pool: each use has KV of its own
    scale: float


def adapters(uses: Iterable[int], size: int, rank: int, out: int) -> nn.ModuleDict:
    """A low-rank product for each use, by the number of its hybrid layer."""
    pair = {str(use): nn.Sequential(Linear(size, rank), Linear(rank, out)) for use in uses}
    return nn.ModuleDict(pair)


def adapter_cuts(name: str, uses: Iterable[int], cut: Cut) -> dict[str, Cut]:
    """``adapters`` under this name, of whose outputs a rank has a part."""
    return {f"{name}.{use}.1.weight": cut for use in uses}


class SharedAttention(Layer):
    def __init__(self, config: ModelConfig, uses: list[int]) -> None:
        super().__init__()
        assert config.attention is not None
        self.config, size = config.attention, 2 * config.hidden_size
        widths = {"q": config.attention.num_heads, "k": config.attention.num_kv_heads}
        widths["v"] = widths["k"]
        for name, heads in widths.items():
            width = heads * config.attention.head_dim
            self.add_module(f"{name}_proj", Linear(size, width))
            if config.raw.get("use_shared_attention_adapter"):
                added = adapters(uses, size, config.raw.get("adapter_rank", 128), width)
                self.add_module(f"linear_{name}_adapter_list", added)
        self.adapted = bool(config.raw.get("use_shared_attention_adapter"))
        self.uses = uses
        self.o_proj = Linear(widths["q"] * config.attention.head_dim, config.hidden_size)
        self.total = Total()

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own, dim = attention_heads(shard, self.config), self.config.head_dim
        kv = rows(*own.group_channels(dim))
        cuts = {"o_proj.weight": columns(own.channels(dim), zero=own.idle)}
        for name, cut in {"q": rows(own.channels(dim)), "k": kv, "v": kv}.items():
            cuts[f"{name}_proj.weight"] = cut
            cuts |= adapter_cuts(f"linear_{name}_adapter_list", self.uses, cut)
        return cuts

    def forward(self, hidden: Tensor, ctx: ForwardContext, use: SharedUse) -> Tensor:
        made = []
        for name in "qkv":
            projected = getattr(self, f"{name}_proj")(hidden)
            if self.adapted:
                own = getattr(self, f"linear_{name}_adapter_list")[str(use.number)]
                projected = projected + own(hidden)
            made.append(projected.unflatten(-1, (-1, self.config.head_dim)))
        q, k, v = made
        if ctx.rotation is not None:
            q, k = (self._ops.rotate(x, *ctx.rotation) for x in (q, k))
        return self.total(self.o_proj(ctx.attention(use, q, k, v).flatten(1)))


class SharedMLP(Layer):
    def __init__(self, config: ModelConfig, uses: list[int]) -> None:
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        bias = bool(config.raw.get("add_bias_linear", False))
        self.act = activation(config.raw.get("hidden_act", "gelu"))
        self.gate_up_proj = Linear(size, 2 * width, bias)
        self.down_proj = Linear(width, size, bias)
        rank = config.raw.get("adapter_rank", 128)
        self.gate_up_proj_adapter_list = adapters(uses, size, rank, 2 * width)
        self.uses = uses
        self.total = Total()

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        size, width = self.down_proj.weight.shape
        own = shard.width(width)
        both = gate_and_up(own, width)
        return {
            **dict.fromkeys(("gate_up_proj.weight", "gate_up_proj.bias"), both),
            **adapter_cuts("gate_up_proj_adapter_list", self.uses, both),
            "down_proj.weight": columns(own),
            "down_proj.bias": once(size, shard),
        }

    def forward(self, hidden: Tensor, use: int) -> Tensor:
        both = self.gate_up_proj(hidden) + self.gate_up_proj_adapter_list[str(use)](hidden)
        gate, up = both.chunk(2, dim=-1)
        return self.total(self.down_proj(self.act(gate) * up))


class SharedTransformer(Layer):
    """Reads hidden states and embeddings side by side. Its result is not added to them."""

    def __init__(self, config: ModelConfig, uses: list[int]) -> None:
        super().__init__()
        self.self_attn = SharedAttention(config, uses)
        self.feed_forward = SharedMLP(config, uses)
        self.input_layernorm = RMSNorm(2 * config.hidden_size, config.norm_eps)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext, use: SharedUse
    ) -> Tensor:
        both = self.input_layernorm(torch.cat([hidden, embedded], dim=-1))
        attended = self.pre_ff_layernorm(self.self_attn(both, ctx, use))
        return self.feed_forward(attended, use.number)


class MambaLayer(Layer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert isinstance(config.recurrence, Mamba2Config)
        index = config.places_before(layer, "recurrent")
        self.mamba = Mamba2Mixer(config.recurrence, config.hidden_size, index, MIXER_EPS)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.total = Total()

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        ctx: ForwardContext,
        shared_output: Tensor | None = None,
    ) -> Tensor:
        given = hidden if shared_output is None else hidden + shared_output
        return hidden + self.total(self.mamba(self.input_layernorm(given), ctx))


class HybridLayer(Layer):
    """A Mamba2 layer and a use of a shared block. ``use`` is its number among the hybrid layers."""

    def __init__(
        self, config: ModelConfig, layer: int, use: int, shared: SharedTransformer
    ) -> None:
        super().__init__()
        assert config.attention is not None
        index = config.places_before(layer, "attention")
        self.use = SharedUse(use, index, config.attention.scale)
        self.shared_transformer = shared
        self.linear = Linear(config.hidden_size, config.hidden_size)
        self.mamba_decoder = MambaLayer(config, layer)

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        shared_output = self.linear(self.shared_transformer(hidden, embedded, ctx, self.use))
        return self.mamba_decoder(hidden, embedded, ctx, shared_output)


class Zamba2ForCausalLM(CausalLM):
    names = Names(norm="final_layernorm")
    reads_embeddings = True

    def __init__(self, config: ModelConfig) -> None:
        hybrids = [i for i, kind in enumerate(config.blocks) if kind == "hybrid"]
        count = min(config.raw.get("num_mem_blocks", 1), len(hybrids))
        begin, end = config.held_layers
        held = [use for use, layer in enumerate(hybrids) if begin <= layer < end]
        shared = [
            SharedTransformer(config, [use for use in held if use % count == block])
            for block in range(count)
        ]
        layers: list[nn.Module] = []
        for i, kind in enumerate(config.blocks):
            if kind == "hybrid":
                use = hybrids.index(i)
                layers.append(HybridLayer(config, i, use, shared[use % count]))
            else:
                layers.append(MambaLayer(config, i))
        super().__init__(config, layers)
        # a shared block is stored under the first layer that uses it
        self.first_user = {layer: hybrids[use % count] for use, layer in enumerate(hybrids)}

    def run_layers(
        self, layers: Sequence[nn.Module], hidden: Tensor, embedded: Tensor, ctx: ForwardContext
    ) -> Tensor:
        for layer in layers:
            hidden = layer(hidden, embedded, ctx)
        return hidden

    def target(self, name: str) -> Target | None:
        if found := SHARED.fullmatch(name):
            owner = self.first_user.get(int(found[1]), int(found[1]))
            name = f"model.layers.{owner}.{found[2]}"
        return super().target(name)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    kinds = values["layers_block_type"]
    head_dim = 2 * hidden // heads
    mamba = Mamba2Config(
        num_heads=values["n_mamba_heads"],
        head_dim=values.get("mamba_expand", 2) * hidden // values["n_mamba_heads"],
        state_size=values["mamba_d_state"],
        num_groups=values.get("mamba_ngroups", 1),
        conv_kernel=values.get("mamba_d_conv", 4),
        conv_bias=True,
        time_step_limit=(0.0, float("inf")),
        chunk_size=values.get("chunk_size", 256),
        in_bias=bool(values.get("add_bias_linear", False)),
        out_bias=bool(values.get("add_bias_linear", False)),
    )
    longest = 16384 if values.get("use_long_context") else values.get("max_position_embeddings")
    rope = rope_config(values, head_dim) if values.get("use_mem_rope") else None
    return model_config(
        values,
        tuple("recurrent" if kind in MAMBA_NAMES else "hybrid" for kind in kinds),
        recurrence=mamba,
        attention=attention_config(
            values, head_dim=head_dim, scale=(head_dim / 2) ** -0.5, rope=rope, bias=False
        ),
        intermediate_size=values.get("intermediate_size") or 4 * hidden,
        max_position_embeddings=longest or 4096,
        tie_word_embeddings=values.get("tie_word_embeddings", True),
    )
