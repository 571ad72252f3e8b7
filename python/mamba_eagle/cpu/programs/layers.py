"""Decode steps through several layers as one program, without Python between their kernels.

A decode step of a small model is a hundred short kernels; Python and torch between them take as
long as the kernels do. What a program computes is what the layers would, bit by bit: it calls the
same kernels in the same order. Layers that have no program (attention, experts, biases, models that
are split) run by themselves between two programs.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import KVPool
from mamba_eagle.cpu import abi
from mamba_eagle.cpu.attention import CpuLanes, CpuTreeAttention
from mamba_eagle.cpu.programs.calls import Call, program_of
from mamba_eagle.cpu.programs.products import Calls, multiplies, takes_prepared_inputs, width_of
from mamba_eagle.cpu.spans import layers as spans
from mamba_eagle.cpu.weights import Mixer, layer_weights
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.layers.adapters import slots_of_rows
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.block import ResidualLayer
from mamba_eagle.layers.context import Rotation
from mamba_eagle.layers.delta_rule import GatedDeltaNet
from mamba_eagle.layers.layer import Residual
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import GatedMLP, PackedGatedMLP, ReluSquaredMLP
from mamba_eagle.layers.norm import GatedGroupRMSNorm
from mamba_eagle.layers.rotary import GatedAttention, WholeNormAttention

ATTENTIONS = (Attention, GatedAttention, WholeNormAttention)
ATTENTION_NS = 10_000  # that attention takes for a node, roughly
NS_PER_NUMBER = 1  # that a norm or a gate takes, with the rounding of its result


class Columns(NamedTuple):
    """Where products leave what a recurrence reads: names in the scratch, widths, first columns."""

    channels: tuple[str, int, int]
    gates: tuple[str, int, int]

    def describe(self, call: Call) -> None:
        own = call.block
        projected, own.columns, own.channels_at = self.channels
        raw, own.raw_columns, own.gates_at = self.gates
        call.lies(projected=projected, raw=raw)


class Builder(Calls):
    """Collects the calls of neighbouring residual layers."""

    about = "layers of a step"

    def __init__(
        self, frame: Any, scheme: Any, pool: KVPool | None, row_slots: abi.RowSlots | None = None
    ) -> None:
        super().__init__(frame, row_slots)
        self.scheme, self.pool = scheme, pool

    def add(self, layer: Residual) -> None:
        """Each kind of body leaves what is added in "made", in rows of as many columns as its
        method returns."""
        body = layer.body
        if isinstance(body, Mamba2Mixer):
            width = self._mixer(layer, body)
        elif isinstance(body, GatedDeltaNet):
            width = self._delta_net(layer, body)
        elif isinstance(body, Attention):
            width = self._attention(layer, body)
        else:
            width = self._mlp(layer, body)
        size = (layer.norm or layer.after).weight.shape[0]
        own = abi.Residual(size=size, columns=width, scale=layer.scale)
        adding = self.call(spans.RESIDUAL, own, work_per_row=size // 8)
        adding.lies(made="made")
        normed_by(adding, layer.after)

    def _norm(self, layer: Residual, reader: Linear) -> None:
        size = reader.weight.shape[1]
        call = self.call(spans.NORM, abi.Norm(size=size), work_per_row=size * NS_PER_NUMBER)
        normed_by(call, layer.norm)
        call.lies(out="inputs")
        self.rounded(call, reader)

    def _mlp(self, layer: Residual, mlp: Any) -> int:
        above, below = mlp_products(mlp)
        kernel = spans.RELU_SQUARED if isinstance(mlp, ReluSquaredMLP) else spans.SILU_GATE
        assert above is not None
        self._norm(layer, above)
        self.product(above, "inputs", "wide")
        size = below.weight.shape[1]
        own = abi.Gate(size=size, columns=width_of(above))
        call = self.call(kernel, own, work_per_row=size * NS_PER_NUMBER)
        call.lies(above="wide", out="inputs")
        self.rounded(call, below)
        return self.product(below, "inputs", "made")

    def _mixer(self, layer: Residual, mixer: Mamba2Mixer) -> int:
        size, norm = mixer.config.inner_size, mixer.norm
        self._norm(layer, mixer.in_proj)
        width = self.product(mixer.in_proj, "inputs", "wide")
        gates_at = size + mixer.config.conv_dim
        self.recur(mixer, Columns(("wide", width, size), ("wide", width, gates_at)))
        own = abi.GatedNorm(size=size, group=norm.group_size, eps=norm.eps, columns=width)
        return self._gated_norm(own, norm.weight, mixer.out_proj, "wide")

    def _delta_net(self, layer: Residual, mixer: GatedDeltaNet) -> int:
        parts, c = mixer.parts, mixer.config
        assert parts is not None
        self._norm(layer, parts.channels)
        orders = parts.orders or (None, None)
        wide, width = self._arranged(parts.channels, "wide", orders[0])
        gates = self._arranged(parts.gates, "gates", orders[1])
        self.recur(mixer, Columns((wide, width, 0), (*gates, 0)))
        own = abi.GatedNorm(size=c.inner_size, group=c.head_dim, eps=parts.norm.eps, columns=width)
        own.assign(gate_at=c.conv_dim, norm_first=True)
        return self._gated_norm(own, parts.norm.weight, parts.out, wide)

    def _arranged(self, reader: Linear, y: str, order: Tensor | None) -> tuple[str, int]:
        """Where a product's outputs stand in an order, and the width of their rows."""
        width = self.product(reader, "inputs", y)
        if order is None:
            return y, width
        size, to = len(order), f"arranged {y}"
        self.scratch.want(to, size * 4)
        call = self.call(spans.ARRANGE, abi.Columns(columns=width, size=size), work_per_row=size)
        call.keep(order=order.numpy())
        call.lies(made=y, out=to)
        return to, size

    def _gated_norm(self, own: abi.GatedNorm, weight: Tensor, out: Linear, wide: str) -> int:
        call = self.call(spans.GATED_NORM, own, work_per_row=own.size * NS_PER_NUMBER * 2)
        call.keep(weight=weight.detach().float().contiguous().numpy())
        call.lies(y="y", projected=wide, out="inputs")
        self.rounded(call, out)
        return self.product(out, "inputs", "made")

    def recur(self, mixer: Mixer, columns: Columns) -> None:
        """From the columns that a mixer has projected its inputs to, to "y"."""
        c, own = mixer.config, abi.Recurrence()
        convolving = c.conv_dim * 4 * NS_PER_NUMBER
        enter = self.call(
            spans.BEGIN_REQUESTS, own,
            units_per_row=0, units_per_request=1, work_per_row=convolving,
        )  # fmt: skip
        self.recurrence(enter, mixer, columns)
        reading = c.inner_size * c.state_size // 16
        self.call(
            spans.HEADS, own,
            units_per_row=0, units_per_request=c.num_heads, work_per_row=reading,
        )  # fmt: skip

    def _attention(self, layer: Residual, attention: Attention) -> int:
        c, packed = attention.config, attention.qkv
        assert packed is not None
        self._norm(layer, packed)
        width = self.product(packed, "inputs", "wide")
        assert self.pool is not None
        keys, values = (kept[attention.index].numpy() for kept in (self.pool.k, self.pool.v))
        gated = isinstance(attention, GatedAttention)
        sizes = {
            "columns": width, "heads": c.num_heads, "kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim, "each": 2 if gated else 1,
        }  # fmt: skip
        if c.rope is not None or isinstance(attention, WholeNormAttention):
            self._place_heads(attention, sizes)
        own = abi.Attention(scale=attention.scale, kv_slots=keys.shape[0], **sizes)
        call = self.call(
            spans.ATTENTION, own,
            units_per_row=0, units_per_tree=c.num_kv_heads, work_per_row=ATTENTION_NS,
        )  # fmt: skip
        call.keep(keys=keys, values=values)
        size = c.num_heads * c.head_dim
        call.lies(packed="wide", out="inputs")
        self.scratch.want("inputs", size * 4)
        if gated:
            gate = abi.GateHeads(columns=width, heads=c.num_heads, head_dim=c.head_dim)
            gating = self.call(spans.GATE_HEADS, gate, work_per_row=size * NS_PER_NUMBER)
            gating.lies(packed="wide", out="inputs")
            self.rounded(gating, attention.o_proj)
        elif takes_prepared_inputs(attention.o_proj):
            inputs = abi.Inputs(size=size)
            rounding = self.call(spans.ROUND_INPUTS, inputs, work_per_row=size)
            rounding.lies(x="inputs")
            self.rounded(rounding, attention.o_proj)
        return self.product(attention.o_proj, "inputs", "made")

    def _place_heads(self, attention: Attention, sizes: dict[str, int]) -> None:
        c, whole = attention.config, isinstance(attention, WholeNormAttention)
        own = abi.PlaceHeads(**sizes, whole=whole)
        work = sizes["columns"] * NS_PER_NUMBER
        call = self.call(spans.PLACE_HEADS, own, work_per_row=work)
        call.lies(packed="wide")
        if whole or c.head_norm:
            own.eps = attention.q_norm.eps
            norms = (attention.q_norm.weight, attention.k_norm.weight)
            q, k = (weight.detach().float().contiguous().numpy() for weight in norms)
            call.keep(q_norm=q, k_norm=k)

    def recurrence(self, call: Call, mixer: Mixer, columns: Columns | None) -> None:
        """columns: None of a fold, which reads none."""
        c, buffers = mixer.config, self.scheme.buffers_of(mixer.index)
        call.keep(**buffers._asdict())
        requests, rows, _ = buffers.xB.shape
        call.block.assign(R=requests, W=rows, states=buffers.state.shape[0])
        describe_recurrence(call, mixer)
        for name, size in (
            ("C", c.num_groups * c.state_size * 4),
            ("seen rows", 2 * rows * 8),
            ("order", 8),
            ("kept", 8),
            ("y", c.inner_size * 4),
        ):
            self.scratch.want(name, size)
        if columns is not None:
            columns.describe(call)
        call.lies(
            seen_C="C", seen_rows="seen rows", seen_order="order", seen_kept="kept", out="y"
        )  # fmt: skip


def describe_recurrence(call: Call, mixer: Mixer) -> None:
    """Weights and sizes."""
    c, weights = mixer.config, layer_weights(mixer)
    conv, heads = (np.ascontiguousarray(each) for each in (weights.conv, weights.heads))
    call.keep(conv=conv, heads=heads)
    call.block.assign(
        low=weights.low, high=weights.high,
        K=c.conv_kernel, channels=c.conv_dim, H=c.num_heads, P=c.head_dim, N=c.state_size,
        G=c.num_groups, E=c.gate_size,
    )  # fmt: skip


def normed_by(call: Call, norm: Any) -> None:
    """norm: an RMSNorm, or None."""
    if norm is not None:
        call.block.eps = norm.eps
        call.keep(weight=norm.weight.detach().float().contiguous().numpy())


class FusedRun:
    """Neighbouring layers as one program."""

    def __init__(self, builder: Builder) -> None:
        self.frame, self.scratch, self.calls = builder.frame, builder.scratch, builder.calls
        self.program = program_of(builder.about, self.calls)
        self._blocks: Any = None  # those of the scratch that the calls know

    def __call__(self, hidden: Tensor, ctx: Any, requests: int, trees: int) -> Tensor:
        """hidden [n, hidden_size], which the result overwrites."""
        n, scratch = hidden.shape[0], self.scratch
        if n > scratch.rows:
            scratch.grow(n)
        if self._blocks is not scratch.blocks:
            for call in self.calls:
                call.place(scratch)
            self._blocks = scratch.blocks
        self.frame.stream, self.frame.rows = hidden.data_ptr(), n
        self.program.run(n, requests, trees)
        return hidden


class SingleLayer:
    """One that has no program."""

    def __init__(self, layer: Residual) -> None:
        self.layer = layer

    def __call__(self, hidden: Tensor, ctx: Any, requests: int, trees: int) -> Tensor:
        made = self.layer.made(hidden, ctx)
        scale = self.layer.scale
        return hidden + made if scale == 1.0 else hidden.add(made, alpha=scale)


class FusedLayers:
    """A scheme's programs, by the layers that they run."""

    def __init__(self, scheme: Any) -> None:
        self._scheme, self.recurrent = ref(scheme), scheme.recurrent
        self._made: dict[tuple[int, int, bool, bool, bool], list[Any] | None] = {}
        self.frame, self.row_slots = abi.Frame(), abi.RowSlots()

    def run(
        self, layers: Sequence[nn.Module], hidden: Tensor, ctx: Any, layout: Any
    ) -> Tensor | None:
        """None: they have to run one by one."""
        paged = ctx.paged
        if not layers or hidden.dtype != torch.float32:
            return None
        if self.recurrent and layout.parents is None:
            return None
        attends = isinstance(paged, (CpuTreeAttention, CpuLanes))
        adapted, rotates = (slots := slots_of_rows()) is not None, ctx.rotation is not None
        # both ends of a slice of a model's own layers
        key = (id(layers[0]), len(layers), attends, adapted, rotates)
        if key not in self._made:
            pool = paged.pool if attends else None
            self._made[key] = self._parts(layers, pool, adapted, rotates)
        parts = self._made[key]
        if parts is None:
            return None
        hidden, requests, trees = hidden.contiguous(), 0, 0
        if slots is not None:
            self.row_slots.point(slots=slots)
        if self.recurrent:
            requests = describe_trees(self.frame, layout)
            self.frame.point(parents=layout.parents)
        if attends:
            own, above = paged.tree
            trees = describe_attention(self.frame, paged.sequences, own.shape[1])
            self.frame.point(own=own, above=above)
        if rotates:
            rotate(self.frame, ctx.rotation)
        for part in parts:
            hidden = part(hidden, ctx, requests, trees)
        return hidden

    def _parts(
        self, layers: Sequence[nn.Module], pool: KVPool | None, adapted: bool, rotates: bool
    ) -> list[Any] | None:
        row_slots = self.row_slots if adapted else None

        def begin() -> Builder:
            return Builder(self.frame, self._scheme(), pool, row_slots)

        return parts_of(layers, begin, pool is not None, rotates)


def new_layout(b: int, T: int, journal: int, history: int) -> TreeLayout:
    """Arrays for the trees of b requests, whose journals have at most ``journal`` rows."""
    slots, state_slots, journal_len = np.zeros((3, b), np.int64)
    journals, rows, tail = (np.zeros((b, size), np.int64) for size in (journal, T, history))
    return TreeLayout(
        slots=slots, state_slots=state_slots, journal=journals, journal_len=journal_len,
        rows=rows, parents=None, ancestors=None, tail=tail, fold=np.zeros(b, np.bool_),
    )  # fmt: skip


def describe_trees(frame: abi.Frame, layout: TreeLayout) -> int:
    """Point the frame to trees, all but their nodes' parents. Returns the number of requests."""
    frame.point(
        slots=layout.slots, state_slots=layout.state_slots, journal=layout.journal,
        journal_len=layout.journal_len, node_rows=layout.rows, tail=layout.tail, fold=layout.fold,
    )  # fmt: skip
    frame.requests, frame.nodes = layout.rows.shape
    frame.max_journal, frame.history = layout.journal.shape[1], layout.tail.shape[1]
    return frame.requests


def describe_attention(frame: abi.Frame, sequences: Sequence[np.ndarray], family: int) -> int:
    """Point the frame to what trees attend to, all but their nodes. sequences: slot table, request
    slots, prefixes. Returns the number of trees."""
    table, slots, prefix = sequences
    frame.point(table=table, attended=slots, prefix=prefix)
    (frame.table_rows, frame.positions), frame.family = table.shape, family
    frame.trees = len(slots)
    return frame.trees


def rotate(frame: abi.Frame, rotation: Rotation) -> None:
    """The pass's angles, which the caller keeps."""
    cos, sin = rotation
    frame.point(cos=cos, sin=sin)
    frame.pairs = cos.shape[-1]


def parts_of(
    layers: Sequence[nn.Module],
    begin: Callable[[], Builder],
    has_pool: bool = False,
    rotates: bool = False,
) -> list[Any] | None:
    """Neighbours with programs together, others by themselves; None if none has one. begin: makes a
    builder. has_pool, rotates: as ``has_program`` takes them."""
    steps = all_residuals(layers)

    def fuses(step: Residual) -> bool:
        return has_program(step, has_pool, rotates)

    if not any(map(fuses, steps)):
        return None
    made: list[Any] = []
    for fused, neighbours in groupby(steps, fuses):
        if not fused:
            made += map(SingleLayer, neighbours)
            continue
        builder = begin()
        for step in neighbours:
            builder.add(step)
        made.append(FusedRun(builder))
    return made


def all_residuals(layers: Sequence[nn.Module]) -> list[Residual]:
    """What the layers consist of; [] if one of them does not say."""
    if not all(isinstance(layer, ResidualLayer) and layer.in_programs for layer in layers):
        return []
    return [step for layer in layers for step in layer.steps()]


def residuals_of(layers: Sequence[nn.Module], rotates: bool = False) -> list[Residual] | None:
    """What the layers consist of, if programs can compute all of it."""
    steps = all_residuals(layers)
    return steps if steps and all(has_program(step, True, rotates) for step in steps) else None


def has_program(layer: Residual, has_pool: bool, rotates: bool = False) -> bool:
    """Whether a program can compute it; has_pool: whether it could read keys and values; rotates:
    whether its frame has the angles."""
    body, norms = layer.body, (layer.norm, layer.after)
    if any(norm is not None and norm.rounding is not None for norm in norms):
        return False
    if not layer.total.alone:
        return False
    if isinstance(body, Mamba2Mixer):
        fits = isinstance(body.norm, GatedGroupRMSNorm)
        return fits and multiplies(body.in_proj) and multiplies(body.out_proj)
    if isinstance(body, GatedDeltaNet):
        return has_delta_program(body)
    if type(body) in ATTENTIONS and has_pool and (packed := body.qkv) is not None:
        placed = rotates or body.config.rope is None
        whole = multiplies(packed) and width_of(packed) % body.config.head_dim == 0
        return placed and whole and multiplies(body.o_proj)
    if isinstance(body, (PackedGatedMLP, GatedMLP, ReluSquaredMLP)):
        first, last = mlp_products(body)
        return first is not None and multiplies(first) and multiplies(last)
    return False


def mlp_products(mlp: PackedGatedMLP | GatedMLP | ReluSquaredMLP) -> tuple[Linear | None, Linear]:
    """The one above its activation, if it is one, and the one below."""
    return (mlp.up_proj, mlp.down_proj) if isinstance(mlp, ReluSquaredMLP) else mlp.products


def has_delta_program(mixer: GatedDeltaNet) -> bool:
    """Both products have to read the same form of their inputs."""
    parts = mixer.parts
    if mixer.config.channel_decay or parts is None:
        return False
    alike = type(parts.channels.packed) is type(parts.gates.packed)
    return alike and all(multiplies(each) for each in (parts.channels, parts.gates, parts.out))
