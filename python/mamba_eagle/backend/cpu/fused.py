"""Decode steps through several layers as one program, without Python between their kernels.

A decode step of a small model is a hundred short kernels; Python and torch between them take as
long as the kernels do. What a program computes is what the layers would, bit by bit: it calls the
same kernels in the same order. Layers that have no program (attention, experts, biases, models that
are split) run by themselves between two programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.backend.cpu.attention import CpuLanes, CpuTreeAttention
from mamba_eagle.backend.cpu.calls import Call, Scratch, table_of
from mamba_eagle.backend.cpu.products import GroupedProduct, OwnProduct, TileProduct
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.kernels import numba_spans as spans
from mamba_eagle.kernels.grouped import cpu as grouped
from mamba_eagle.kernels.linear import cpu as linear
from mamba_eagle.kernels.linear import cpu_tiles
from mamba_eagle.kernels.numba_spans import Attended, Frame, Recurrence
from mamba_eagle.kernels.numba_team import Program
from mamba_eagle.kernels.tree_verify import cpu
from mamba_eagle.kernels.vector_code import SpanKernel
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.gated_mlp import PackedGatedMLP
from mamba_eagle.layers.layer import Residual
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import ReluSquaredMLP
from mamba_eagle.layers.norm import GatedGroupRMSNorm

ATTENTION_NS = 10_000  # that attention takes for a node, roughly
PARTS = "parts"  # in the scratch: inputs in the form that a product in tiles reads
NS_PER_NUMBER = 1  # that a norm or a gate takes, with the rounding of its result


class Builder:
    """Collects the calls of neighbouring residual layers."""

    def __init__(self, frame: np.ndarray, scheme: Any, pool: KVPool | None) -> None:
        self.frame, self.scheme, self.pool = frame, scheme, pool
        self.scratch, self.calls = Scratch(), []  # type: ignore[var-annotated]

    def add(self, layer: Residual) -> None:
        body = layer.body
        if isinstance(body, Mamba2Mixer):
            made, width = self._mixer(layer, body)
        elif isinstance(body, Attention):
            made, width = self._attention(layer, body)
        elif isinstance(body, PackedGatedMLP):
            last = body.output_linear
            self._norm(layer, body.input_linear)
            self.product(body.input_linear, "inputs", "wide")
            self._gate(spans.SILU_GATE, body.input_linear, last)
            made, width = "made", self.product(last, "inputs", "made")
        else:
            last = body.down_proj
            self._norm(layer, body.up_proj)
            self.product(body.up_proj, "inputs", "wide")
            self._gate(spans.RELU_SQUARED, body.up_proj, last)
            made, width = "made", self.product(last, "inputs", "made")
        size = layer.norm.weight.shape[0]
        call = self.call(spans.RESIDUAL, [0, size, 0, width, 0], work_per_row=size // 8)
        call.scratch[2] = (made, 0)
        call.keep(4, np.array([layer.scale], np.float32))

    def call(self, kernel: SpanKernel, words: Sequence[int], **columns: int) -> Call:
        """One whose units are rows, and whose first word is the frame's address."""
        columns = {"units_per_row": 1} | columns
        call = Call(kernel, words, **columns)
        call.words[0] = self.frame.ctypes.data
        self.calls.append(call)
        return call

    def rounded(self, call: Call, place: int, reader: Linear) -> None:
        """The last words of a call, and its float32 result: what ``reader`` reads."""
        size = reader.weight.shape[1]
        self.scratch.want("inputs", size * 4)
        if isinstance(reader.packed, GroupedProduct):
            self.scratch.want("rounded", size + size // grouped.GROUP * 8)
            groups = size // grouped.GROUP * 4
            for i, before in enumerate((0, size, size + groups)):
                call.scratch[place + i] = ("rounded", before)
        elif isinstance(reader.packed, TileProduct):
            # tiles have the parts of several rows
            each = -(-cpu_tiles.parts_bytes(cpu_tiles.TILE_ROWS, size) // cpu_tiles.TILE_ROWS)
            self.scratch.want(PARTS, each, spare=cpu_tiles.TILE_ROWS)
            call.scratch[place] = (PARTS, 0)

    def _norm(self, layer: Residual, reader: Linear) -> None:
        size, norm = layer.norm.weight.shape[0], layer.norm
        words = [0, 0, 0, size, 0, 0, 0, 0]
        call = self.call(spans.NORM, words, work_per_row=size * NS_PER_NUMBER)
        call.keep(1, norm.weight.detach().float().contiguous().numpy())
        call.keep(2, np.array([norm.eps], np.float64))
        call.scratch[4] = ("inputs", 0)
        self.rounded(call, 5, reader)

    def _gate(self, kernel: SpanKernel, above: Linear, below: Linear) -> None:
        size = below.weight.shape[1]
        words = [0, size, 0, width_of(above), 0, 0, 0, 0]
        call = self.call(kernel, words, work_per_row=size * NS_PER_NUMBER)
        call.scratch |= {2: ("wide", 0), 4: ("inputs", 0)}
        self.rounded(call, 5, below)

    def product(self, layer: Linear, x: str, y: str) -> int:
        """Returns the columns of its result, y in the scratch."""
        packed = layer.packed
        assert isinstance(packed, OwnProduct)
        product = packed.product
        self.scratch.want(y, product.width * 4)
        given = list(product.call.arguments)
        if isinstance(product, grouped.Product):
            size = product.inputs
            per_row = size * product.width // grouped.PRODUCTS_PER_NS
            call = Call(
                product.call.kernel, given, units=product.blocks, rows_at=7,
                work=product.read_ns, work_per_row=per_row,
            )  # fmt: skip
            groups = size // grouped.GROUP * 4
            call.scratch = {0: ("rounded", 0), 1: ("rounded", size), 2: ("rounded", size + groups)}
            call.scratch[6] = (y, 0)
        else:
            in_tiles = isinstance(product, cpu_tiles.Product)
            per_ns = cpu_tiles.PRODUCTS_PER_NS if in_tiles else linear.PRODUCTS_PER_NS
            call = Call(
                product.call.kernel, given, units=product.count, rows_at=3,
                work=product.read_ns, work_per_row=product.inputs * product.width // per_ns,
            )  # fmt: skip
            call.scratch = {0: (PARTS if in_tiles else x, 0), 2: (y, 0)}
        call.kept.append(packed)
        self.calls.append(call)
        return product.width

    def _mixer(self, layer: Residual, mixer: Mamba2Mixer) -> tuple[str, int]:
        size, norm = mixer.config.inner_size, mixer.norm
        self._norm(layer, mixer.in_proj)
        width = self.product(mixer.in_proj, "inputs", "wide")
        self.recur(mixer, width)
        words = [0, 0, 0, size, norm.group_size, 0, 0, width, 0, 0, 0, 0]
        gate = self.call(spans.GATED_NORM, words, work_per_row=size * NS_PER_NUMBER * 2)
        gate.keep(1, norm.weight.detach().float().contiguous().numpy())
        gate.keep(2, np.array([norm.eps], np.float64))
        gate.scratch |= {5: ("y", 0), 6: ("wide", 0), 8: ("inputs", 0)}
        self.rounded(gate, 9, mixer.out_proj)
        return "made", self.product(mixer.out_proj, "inputs", "made")

    def recur(self, mixer: Mamba2Mixer, width: int) -> None:
        """From the columns that a mixer has projected its inputs to, "wide", to "y"."""
        c, words = mixer.config, [0] * Recurrence.COUNT
        convolving = c.conv_dim * 4 * NS_PER_NUMBER
        enter = self.call(
            spans.BEGIN_REQUESTS, words,
            units_per_row=0, units_per_request=1, work_per_row=convolving,
        )  # fmt: skip
        self.recurrence(enter, mixer, width)
        reading = c.inner_size * c.state_size // 16
        heads = self.call(
            spans.HEADS, list(enter.words),
            units_per_row=0, units_per_request=c.num_heads, work_per_row=reading,
        )  # fmt: skip
        heads.scratch, heads.kept = enter.scratch, enter.kept

    def _attention(self, layer: Residual, attention: Attention) -> tuple[str, int]:
        c, at = attention.config, Attended
        packed = attention.qkv
        assert packed is not None
        self._norm(layer, packed)
        width = self.product(packed, "inputs", "wide")
        words = [0] * at.COUNT
        words[at.WIDTH], words[at.HEADS] = width, c.num_heads
        words[at.KV_HEADS], words[at.HEAD_DIM] = c.num_kv_heads, c.head_dim
        call = self.call(
            spans.ATTENTION, words,
            units_per_row=0, units_per_tree=c.num_kv_heads, work_per_row=ATTENTION_NS,
        )  # fmt: skip
        call.keep(at.SCALE, np.array([attention.scale], np.float32))
        assert self.pool is not None
        for place, kept in ((at.KEYS, self.pool.k), (at.VALUES, self.pool.v)):
            array = kept[attention.index].numpy()
            assert array.flags.c_contiguous
            call.keep(place, array)
            call.words[at.KV_SLOTS] = array.shape[0]
        size = c.num_heads * c.head_dim
        call.scratch |= {at.PACKED: ("wide", 0), at.OUT: ("inputs", 0)}
        self.scratch.want("inputs", size * 4)
        if takes_prepared_inputs(attention.o_proj):
            rounding = self.call(spans.ROUND_INPUTS, [0, size, 0, 0, 0, 0], work_per_row=size)
            rounding.scratch[2] = ("inputs", 0)
            self.rounded(rounding, 3, attention.o_proj)
        return "made", self.product(attention.o_proj, "inputs", "made")

    def recurrence(self, call: Call, mixer: Mamba2Mixer, width: int) -> None:
        c, scheme, at = mixer.config, self.scheme, Recurrence
        weights: cpu.LayerWeights = scheme.weights_of(mixer)
        buffers: cpu.Buffers = scheme.buffers_of(mixer)
        arrays = {
            at.CONV: np.ascontiguousarray(weights.conv),
            at.HEADS: np.ascontiguousarray(weights.heads),
            at.LIMITS: np.array([weights.low, weights.high], np.float32),
        }
        for place, array in arrays.items():
            call.keep(place, array)
        for place, buffer in zip(range(at.CONV_IN, at.STATE + 1), buffers, strict=True):
            assert buffer.flags.c_contiguous
            call.keep(place, buffer)
        sizes = {
            at.WIDTH: width,
            at.SLOTS: buffers.conv_in.shape[0],
            at.TAPS: c.conv_kernel,
            at.ROWS: buffers.xB.shape[1],
            at.CHANNELS: c.conv_dim,
            at.NUM_HEADS: c.num_heads,
            at.HEAD_DIM: c.head_dim,
            at.STATE_SIZE: c.state_size,
            at.GROUPS: c.num_groups,
            at.STATES: buffers.state.shape[0],
        }
        for place, size in sizes.items():
            call.words[place] = size
        rows = buffers.xB.shape[1]
        seen = {
            at.SEEN_C: ("C", c.num_groups * c.state_size * 4),
            at.SEEN_ROWS: ("seen rows", 2 * rows * 8),
            at.SEEN_ORDER: ("order", 8),
            at.SEEN_KEPT: ("kept", 8),
            at.OUT: ("y", c.inner_size * 4),
        }
        call.scratch[at.PROJECTED] = ("wide", 0)
        for place, (name, size) in seen.items():
            self.scratch.want(name, size)
            call.scratch[place] = (name, 0)


class FusedRun:
    """Neighbouring layers as one program."""

    def __init__(self, builder: Builder) -> None:
        self.frame, self.scratch, self.calls = builder.frame, builder.scratch, builder.calls
        self.program: Program | None = None

    def __call__(self, hidden: Tensor, ctx: Any, requests: int, trees: int) -> Tensor:
        """hidden [n, hidden_size], which the result overwrites."""
        n = hidden.shape[0]
        if self.program is None or n > self.scratch.rows:
            self._place(n)
        assert self.program is not None
        self.frame[Frame.STREAM], self.frame[Frame.ROWS] = hidden.data_ptr(), n
        self.program.run(n, requests, trees)
        return hidden

    def _place(self, rows: int) -> None:
        self.scratch.grow(rows)
        for call in self.calls:
            call.place(self.scratch)
        self.program = Program(table_of(self.calls))


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
        self._made: dict[tuple[int, int, bool], list[Any] | None] = {}
        self.frame = np.zeros(Frame.COUNT, np.int64)

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
        key = (id(layers[0]), len(layers), attends)  # both ends of a slice of a model's own layers
        if key not in self._made:
            self._made[key] = self._parts(layers, paged.pool if attends else None)
        parts = self._made[key]
        if parts is None:
            return None
        hidden, requests, trees = hidden.contiguous(), 0, 0
        if self.recurrent:
            requests = self._describe(layout)
        if attends:
            trees = self._describe_attention(paged)
        for part in parts:
            hidden = part(hidden, ctx, requests, trees)
        return hidden

    def _describe(self, layout: Any) -> int:
        """Returns the number of requests."""
        frame = self.frame
        b, nodes = layout.rows.shape
        arrays = (
            layout.slots, layout.state_slots, layout.journal, layout.journal_len,
            layout.rows, layout.parents, layout.tail,
        )  # fmt: skip
        for i, array in enumerate(arrays):
            frame[Frame.SLOTS + i] = address_of(array)
        frame[Frame.FOLD] = layout.fold.ctypes.data
        sizes = (b, nodes, layout.journal.shape[1], layout.tail.shape[1])
        frame[Frame.REQUESTS : Frame.HISTORY + 1] = sizes
        return int(b)

    def _describe_attention(self, paged: CpuTreeAttention | CpuLanes) -> int:
        """Returns the number of trees."""
        frame, (table, slots, prefix) = self.frame, paged.sequences
        own, above = paged.tree
        frame[Frame.TABLE : Frame.TREES + 1] = (
            address_of(table), *table.shape, address_of(slots), address_of(prefix),
            address_of(own), address_of(above), own.shape[1], len(own),
        )  # fmt: skip
        return len(own)

    def _parts(self, layers: Sequence[nn.Module], pool: KVPool | None) -> list[Any] | None:
        def fuses(step: Residual) -> bool:
            return has_program(step, pool is not None)

        return parts_of(layers, fuses, lambda: Builder(self.frame, self._scheme(), pool), FusedRun)


def parts_of(
    layers: Sequence[nn.Module],
    fuses: Callable[[Residual], bool],
    begin: Callable[[], Builder],
    end: Callable[[Any], Any],
) -> list[Any] | None:
    """Neighbours with programs (``fuses``) together, others by themselves; None if none has one.
    begin, end: make a builder, and of it what runs its calls."""
    steps = all_residuals(layers)
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
        made.append(end(builder))
    return made


def all_residuals(layers: Sequence[nn.Module]) -> list[Residual]:
    """What the layers consist of; nothing, if one of them does not say."""
    steps: list[Residual] = []
    for layer in layers:
        own = layer.residuals() if hasattr(layer, "residuals") else ()
        if not own:
            return []
        steps += own
    return steps


def residuals_of(layers: Sequence[nn.Module]) -> list[Residual] | None:
    """What the layers consist of, if programs can compute all of it."""
    steps = all_residuals(layers)
    return steps if steps and all(has_program(step, True) for step in steps) else None


def has_program(layer: Residual, has_pool: bool) -> bool:
    """Whether a program can compute it; has_pool: whether it could read keys and values."""
    body = layer.body
    if layer.norm.rounding is not None or not layer.total.alone:
        return False
    if isinstance(body, Mamba2Mixer):
        fits = isinstance(body.norm, GatedGroupRMSNorm)
        return fits and multiplies(body.in_proj) and multiplies(body.out_proj)
    if type(body) is Attention and has_pool and (packed := body.qkv) is not None:
        whole = multiplies(packed) and width_of(packed) % body.config.head_dim == 0
        return whole and multiplies(body.o_proj)
    if isinstance(body, PackedGatedMLP):
        fits = body.gate.act is F.silu
        return fits and multiplies(body.input_linear) and multiplies(body.output_linear)
    if isinstance(body, ReluSquaredMLP):
        return multiplies(body.up_proj) and multiplies(body.down_proj)
    return False


def multiplies(layer: Linear) -> bool:
    """Whether a program can call its product, and that is all of it."""
    return layer.bias is None and is_called(layer)


def is_called(layer: Linear) -> bool:
    """Whether a program can call its product."""
    return isinstance(layer.packed, OwnProduct)


def takes_prepared_inputs(layer: Linear) -> bool:
    """Whether its product reads what the call before made of its inputs, not float32."""
    return isinstance(layer.packed, (TileProduct, GroupedProduct))


def width_of(layer: Linear) -> int:
    """Columns of a product's result, padding included."""
    return cast(Any, layer.packed).product.width


def address_of(array: np.ndarray) -> int:
    assert array.dtype == np.int64 and array.flags.c_contiguous
    return array.ctypes.data
