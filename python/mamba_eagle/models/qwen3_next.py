"""Qwen3-Next: gated DeltaNet layers, every fourth one gated attention; routed experts and a shared
one in nearly all layers."""

import re
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mamba_eagle.layers.block import LayerNames, PreNormLayer
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.delta_rule import GatedDeltaNet, Parts, Projected
from mamba_eagle.layers.gated_norm import HeadNormThenGate
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.moe import GatedSharedMoE
from mamba_eagle.layers.norm import keep_exact
from mamba_eagle.layers.rotary import GatedAttention
from mamba_eagle.model_config import DeltaConfig, ModelConfig, MoEConfig, Span
from mamba_eagle.models.base import CausalLM, Target, gated_expert_place
from mamba_eagle.models.parse import attention_config, blocks_of, model_config, only
from mamba_eagle.parallel.cut import Cut, columns, rows
from mamba_eagle.parallel.shard import Shard, recurrent_heads

BLOCK_OF_NAME = {"linear_attention": "recurrent", "full_attention": "attention"}
CENTRED = re.compile(r".*(?<!linear_attn\.)norm\w*\.weight")  # norms stored as weight - 1


class QwenDeltaNet(GatedDeltaNet):
    """What Qwen3-Next and its successors have in common: all but the projections."""

    def __init__(self, config: DeltaConfig, hidden_size: int, index: int, norm_eps: float) -> None:
        super().__init__(config, index)
        self.make_projections(hidden_size)
        self.norm = HeadNormThenGate(config.head_dim, norm_eps)
        self.out_proj = Linear(config.inner_size, hidden_size)

    @abstractmethod
    def make_projections(self, hidden_size: int) -> None: ...

    @abstractmethod
    def input_cuts(self, shard: Shard) -> dict[str, Cut]:
        """Of the projections."""

    @property
    def ends(self) -> tuple[HeadNormThenGate, Linear]:
        return self.norm, self.out_proj

    def connect(self) -> None:
        self.norm.rounding = self.out_proj.rounding

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own = recurrent_heads(shard, self.config)
        out = columns(own.channels(self.config.head_dim), zero=own.idle)
        return {**super().cuts(shard), **self.input_cuts(shard), "out_proj.weight": out}


class JoinedDeltaNet(QwenDeltaNet):
    """The projections are two matrices, in which everything of one key head is side by side: its
    query and key, then the values and gates of the value heads that share it."""

    def make_projections(self, hidden_size: int) -> None:
        c = self.config
        self.in_proj_qkvz = Linear(hidden_size, c.conv_dim + c.inner_size)
        self.in_proj_ba = Linear(hidden_size, 2 * c.num_heads)

    @property
    def parts(self) -> Parts | None:
        qkvz, ba = self.in_proj_qkvz, self.in_proj_ba
        at = self.arranged(*(torch.arange(each.weight.shape[0])[None] for each in (qkvz, ba)))
        orders = (torch.cat([at.channels, at.gate], dim=-1)[0], at.gates[0])
        return Parts(qkvz, ba, *self.ends, orders)

    def project(self, hidden: Tensor, ctx: ForwardContext) -> Projected:
        made = self.arranged(self.in_proj_qkvz(hidden), self.in_proj_ba(hidden))
        return made._replace(gates=ctx.gates(self, made.gates))

    def arranged(self, qkvz: Tensor, ba: Tensor) -> Projected:
        c = self.config
        width = c.inner_size // c.num_groups
        groups = qkvz.unflatten(-1, (c.num_groups, -1))
        *channels, gate = groups.split([c.state_size, c.state_size, width, width], dim=-1)
        beta, decay = ba.unflatten(-1, (c.num_groups, -1)).chunk(2, dim=-1)
        raw = torch.cat([decay.flatten(1), beta.flatten(1)], dim=-1)
        return Projected(torch.cat([p.flatten(1) for p in channels], -1), gate.flatten(1), raw)

    def input_cuts(self, shard: Shard) -> dict[str, Cut]:
        c, own = self.config, recurrent_heads(shard, self.config)
        each = c.num_heads // c.num_groups  # value heads of a key head
        served = own.heads.size // len(own.groups)
        qkvz, ba = [], []
        for at, group in enumerate(own.groups):
            head = own.heads.begin + at * served - group * each
            keys, values = 2 * c.state_size, each * c.head_dim
            first = group * (keys + 2 * values)
            qkvz.append(Span(first, first + keys))
            for begin in (first + keys, first + keys + values):
                begin += head * c.head_dim
                qkvz.append(Span(begin, begin + served * c.head_dim))
            for begin in (2 * group * each + head, (2 * group + 1) * each + head):
                ba.append(Span(begin, begin + served))
        return {"in_proj_qkvz.weight": rows(*qkvz), "in_proj_ba.weight": rows(*ba)}


class QwenLayer(PreNormLayer):
    names = LayerNames(recurrent="linear_attn")
    attention, experts = GatedAttention, GatedSharedMoE
    recurrent: ClassVar[type[QwenDeltaNet]] = JoinedDeltaNet
    in_programs = True

    def is_sparse(self, config: ModelConfig, layer: int) -> bool:
        step = config.raw.get("decoder_sparse_step", 1)
        return layer not in config.raw.get("mlp_only_layers", ()) and (layer + 1) % step == 0


def qwen_place(name: str) -> Target | None:
    """Experts are published one by one, or stacked under another name; norms without their 1."""
    if name.endswith(".experts.gate_up_proj"):
        return Target(name.replace("gate_up_proj", "up_proj"))
    if CENTRED.fullmatch(name):
        return Target(name, shift=1.0)
    return gated_expert_place(name)


class Qwen3NextForCausalLM(CausalLM):
    layer_class = QwenLayer
    skipped: ClassVar[tuple[str, ...]] = ("mtp.",)
    place = staticmethod(qwen_place)
    late_sums = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        keep_exact(self)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Also reads the text part of Qwen3.5's.

    Raises: UnsupportedModel, KeyError naming what config.json lacks.
    """
    only(values, hidden_act="silu", norm_topk_prob=True)
    kinds = values.get("layer_types")
    if kinds is None:
        every = values.get("full_attention_interval", 4)
        layers = range(1, values["num_hidden_layers"] + 1)
        kinds = ["linear_attention" if layer % every else "full_attention" for layer in layers]
    known = {**values, "head_dim": values.get("head_dim") or 256}
    moe = None
    if values.get("num_experts"):
        moe = MoEConfig(
            num_experts=values["num_experts"],
            top_k=values["num_experts_per_tok"],
            intermediate_size=values["moe_intermediate_size"],
            shared_intermediate_size=values["shared_expert_intermediate_size"],
        )
    return model_config(
        values,
        blocks_of(values, kinds, BLOCK_OF_NAME),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        recurrence=DeltaConfig(
            num_heads=values["linear_num_value_heads"],
            head_dim=values["linear_value_head_dim"],
            state_size=values["linear_key_head_dim"],
            num_groups=values["linear_num_key_heads"],
            conv_kernel=values.get("linear_conv_kernel_dim", 4),
        ),
        attention=attention_config(known, rotated=0.25, head_norm=True),
        moe=moe,
        mlp_bias=False,
    )
