"""Where the earlier tokens are while serving: KV slots, state slots and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.causal_conv.naive import causal_conv
from mamba_eagle.kernels.ssd.naive import ssd_chunked
from mamba_eagle.kernels.tree_attention.cpu import paged_tree_attention
from mamba_eagle.kernels.tree_attention.naive import masked_attention
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.rotary import Rotation
from mamba_eagle.message import PrefillItem
from mamba_eagle.model_config import Mamba2Config
from mamba_eagle.runner.pools import KVPool, StatePool
from mamba_eagle.runner.transfer import to_device
from mamba_eagle.runner.verify import VerifyScheme


class TreeAttention(Protocol):
    """Attention of new tokens, wherever keys and values are."""

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""


class PagedAttention:
    """Attention of T new tokens of each of b requests over slots of a KV pool.

    Args:
        write_slots: [b*T] where the new keys and values go.
        read_slots: [b, S], the slots each request's tokens look at; the new ones among them.
        mask_bias: [b, T, S], 0 where a token may look, -inf elsewhere.
    """

    def __init__(
        self, pool: KVPool, write_slots: Tensor, read_slots: Tensor, mask_bias: Tensor
    ) -> None:
        self.pool, self.write_slots, self.read_slots = pool, write_slots, read_slots
        self.mask_bias = mask_bias

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        self.pool.write(layer.index, self.write_slots, k, v)
        keys, values = self.pool.read(layer.index, self.read_slots)
        shape = self.mask_bias.shape[:2]
        out = masked_attention(
            q.unflatten(0, shape), keys, values, self.mask_bias.to(q.dtype), layer.scale
        )
        return out.flatten(0, 1)


class PromptSpan(NamedTuple):
    """The next tokens of a prompt, positions [start, start + length) of request slot ``slot``."""

    slot: int
    start: int
    length: int


class CausalAttention:
    """Attention of prompt chunks to what is before them in their requests, one after the other."""

    def __init__(self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan]) -> None:
        self.lengths = [span.length for span in spans]
        self.parts = [self._part(pool, slot_table[span.slot], span) for span in spans]

    def _part(self, pool: KVPool, table: Tensor, span: PromptSpan) -> PagedAttention:
        start, end = span.start, span.start + span.length
        mask = torch.full((1, span.length, end), float("-inf"), device=table.device)
        return PagedAttention(pool, table[start:end], table[None, :end], mask.triu_(start + 1))

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]; the chunks' tokens in a row."""
        chunks = zip(self.parts, *(part.split(self.lengths) for part in (q, k, v)), strict=True)
        outputs = [part.attend(layer, *inputs) for part, *inputs in chunks]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def prompt_attention(
    pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan]
) -> TreeAttention | None:
    """For the tokens of ``spans``, one after the other; slot_table [R, positions], in which they
    have their slots. None if the pool has no layers."""
    if not pool.k.shape[0]:
        return None
    if gpu.flashinfer_usable(pool.k.device, pool.k.dtype):
        from mamba_eagle.runner.flashinfer_attention import HEAD_DIMS, FlashInferPrompts

        if pool.k.shape[-1] in HEAD_DIMS:
            return FlashInferPrompts(pool, slot_table, spans)
    return CausalAttention(pool, slot_table, spans)


@dataclass
class PrefillPart:
    """One request's chunk in a prefill batch: tokens [first, first + length) of the flat input."""

    item: PrefillItem
    first: int
    length: int


def prefill_parts(items: Sequence[PrefillItem]) -> list[PrefillPart]:
    """The items' tokens, one behind the other."""
    lengths = [len(item.token_ids) for item in items]
    firsts = [0, *accumulate(lengths)]
    return [PrefillPart(*part) for part in zip(items, firsts, lengths)]


def start_finished(
    scheme: VerifyScheme, items: Sequence[PrefillItem], device: torch.device
) -> None:
    """Let the scheme take over the requests whose prompts are over."""
    last = [(item.slot, item.state_slot) for item in items if item.is_last]
    if last:
        scheme.start(*to_device(list(zip(*last)), torch.int64, device))


class PrefillContext:
    """Prompt chunks of several requests, one after the other in the flat input.

    Reads each request's state slot, writes it after the chunk, and writes the state slots that
    the plan wants at positions in between.
    """

    rotation: Rotation | None = None

    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        kv: KVPool,
        slot_table: Tensor,
    ) -> None:
        """slot_table [R, positions], with the KV slots of the parts' tokens."""
        self.parts, self.pool = parts, pool
        for part in parts:
            if part.item.is_first:
                self._begin(part.item)
        spans = [PromptSpan(part.item.slot, part.item.start, part.length) for part in parts]
        self.paged = prompt_attention(kv, slot_table, spans)

    def _begin(self, item: PrefillItem) -> None:
        """The request's own state slot takes the state to start from."""
        self.pool.begin(item)

    @property
    def positions(self) -> Tensor:
        starts = [(part.item.start, part.item.start + part.length) for part in self.parts]
        return torch.cat([torch.arange(first, end) for first, end in starts])

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.paged is not None, "the model has no attention layer"
        return self.paged.attend(layer, q, k, v)

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        dt = layer.step_size(dt)
        outputs = []
        for part in self.parts:
            span = slice(part.first, part.first + part.length)
            outputs.append(self._mamba_one(part, layer, xbc[span], dt[span]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _mamba_one(self, part: PrefillPart, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        item, ssm, conv = part.item, self.pool.ssm[layer.index], self.pool.conv[layer.index]
        before = conv[item.state_slot]
        width = before.shape[0]
        convolved = causal_conv(
            xbc[None], layer.conv1d.weight[:, 0], layer.conv1d.bias, before[None]
        )
        x, B, C = layer.split_xbc(convolved)
        inputs = torch.cat([before.to(xbc.dtype), xbc])  # raw convolution inputs, history first
        state = ssm[item.state_slot][None]
        outputs = []
        for begin, end, saves in segments(item, part.length, layer.config.chunk_size):
            span = slice(begin, end)
            scan = ssd_chunked(
                x[:, span],
                dt[None, span],
                layer.decay_rate(),
                B[:, span],
                C[:, span],
                layer.D,
                layer.config.chunk_size,
                state,
            )
            outputs.append(scan.y)
            state = scan.final_state
            for offset, boundary, state_slot in saves:
                saved = state if boundary is None else scan.boundary_states[:, boundary]
                ssm[state_slot] = saved[0].to(ssm.dtype)
                conv[state_slot] = inputs[offset : offset + width]
        ssm[item.state_slot] = state[0].to(ssm.dtype)
        conv[item.state_slot] = inputs[part.length :]
        return torch.cat(outputs, dim=1)[0].flatten(1)


def prefill_context(
    parts: list[PrefillPart],
    pool: StatePool,
    kv: KVPool,
    slot_table: Tensor,
    mamba: Mamba2Config | None,
) -> PrefillContext:
    """With kernels where there are some for the pool's device and dtypes."""
    if mamba is not None and gpu.usable(pool.ssm.device, pool.ssm.dtype, pool.conv.dtype):
        from mamba_eagle.runner.triton_layer import sizes_known
        from mamba_eagle.runner.triton_prefill import TritonPrefillContext

        if sizes_known(mamba):
            return TritonPrefillContext(parts, pool, kv, slot_table)
    return PrefillContext(parts, pool, kv, slot_table)


def segments(
    item: PrefillItem, length: int, chunk: int
) -> list[tuple[int, int, list[tuple[int, int | None, int]]]]:
    """Cut a prompt chunk so that each wanted state slot lies on a boundary the scan passes.

    The scan of a segment has the states at multiples of ``chunk`` from the segment's begin for
    nothing; any other wanted position ends the segment.

    Returns: [(begin, end, [(offset, boundary or None for the end, state slot)])], offsets
        from the chunk's first token.
    """
    cuts = []
    begin = 0
    saves: list[tuple[int, int | None, int]] = []
    for save in item.saves:
        offset = save.position - item.start
        if offset < length and (offset - begin) % chunk == 0:
            saves.append((offset, (offset - begin) // chunk, save.state_slot))
            continue
        saves.append((offset, None, save.state_slot))
        cuts.append((begin, offset, saves))
        begin, saves = offset, []
    if begin < length:
        cuts.append((begin, length, saves))
    return cuts


class VerifyContext:
    """The nodes of b trees: attention under the tree mask, recurrence by the verify scheme."""

    rotation: Rotation | None = None

    def __init__(
        self,
        scheme: VerifyScheme,
        attention: TreeAttention | None,
        positions: Tensor,
    ) -> None:
        """positions [b*T]: of the nodes, that is, tokens run before the tree + depth."""
        self.scheme, self.paged, self.positions = scheme, attention, positions

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.paged is not None
        return self.paged.attend(layer, q, k, v)

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        return self.scheme.verify(layer, xbc, dt)


class FusedTreeAttention:
    """Attention of tree nodes on a CPU, straight from the pool."""

    def __init__(
        self,
        pool: KVPool,
        slot_table: Tensor,
        slots: Tensor,
        prefix: Tensor,
        kv_slots: Tensor,
        parents: Tensor,
    ) -> None:
        """As ``tree_attention``."""
        self.keys, self.values = pool.k.numpy(), pool.v.numpy()
        indices = (slot_table, slots, prefix, kv_slots, parents)
        self.indices = tuple(part.numpy() for part in indices)

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        out = torch.empty(q.shape)
        paged_tree_attention(
            *(part.contiguous().numpy() for part in (q, k, v)),
            self.keys[layer.index],
            self.values[layer.index],
            *self.indices,
            layer.scale,
            out.numpy(),
        )
        return out


def tree_attention(
    pool: KVPool,
    slot_table: Tensor,
    slots: Tensor,
    prefix: Tensor,
    kv_slots: Tensor,
    parents: Tensor,
    ancestors: Tensor,
) -> TreeAttention | None:
    """Tree nodes look at the tokens before the root and at their ancestors and themselves.

    Args: slot_table [R, positions]; slots [b], request slots; prefix [b], the root's position;
        kv_slots [b, T], the nodes'; parents [b, T]; ancestors [b, T, T].
    Returns: None if the pool has no layers.
    """
    if not pool.k.shape[0]:
        return None
    if numba_math.usable(pool.k.device, pool.k.dtype):
        return FusedTreeAttention(pool, slot_table, slots, prefix, kv_slots, parents)
    if gpu.usable(pool.k.device, pool.k.dtype):
        from mamba_eagle.runner.triton_attention import TritonTreeAttention  # needs triton

        return TritonTreeAttention(pool, slot_table, slots, prefix, kv_slots, ancestors)
    longest = int(prefix.max())
    before = torch.arange(longest, device=prefix.device) < prefix[:, None]  # [b, longest]
    visible = torch.cat([before[:, None].expand(-1, ancestors.shape[1], -1), ancestors], dim=2)
    bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
    read = torch.cat([slot_table[slots, :longest], kv_slots], dim=1)
    return PagedAttention(pool, kv_slots.reshape(-1), read, bias)
