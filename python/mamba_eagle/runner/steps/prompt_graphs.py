"""Passes over few prompt tokens as CUDA graphs: the host would launch their kernels one by one more
slowly than the device executes them.

A pass is captured for a few numbers of tokens, and takes the next larger one. What fills it up
belongs to no request: kernels that go by requests skip it, and others compute rows that no one
reads. What depends on the prompts beyond numbers in tables (attention, whose work is divided on
the host; the scan of delta rules) is left out, so a pass is a row of graphs:

    tokens, positions, tables → [ … qkv ] → attention → [ out … qkv ] → … → [ out … ] → features

Those of all sizes share one memory pool: a pass ends before another one begins, and its features
are copied. Passes in which a row has an adapter are captured apart.

Mixtures of experts have passes of all sizes: of a layer the device has little to do, and the host
launches as much as for any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart, prefill_parts
from mamba_eagle.layers.adapters import reading, slots_of_rows
from mamba_eagle.layers.context import AttentionView, ForwardContext
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.message import PrefillItem
from mamba_eagle.message.indices import indices
from mamba_eagle.parallel.groups import Window
from mamba_eagle.runner.steps.decode_step import DecodeStep

log = logging.getLogger("mamba_eagle.runner")

# Less than a third of a pass is padding, from 64 tokens on. For more than the last one an H100
# takes longer with a 9B model than the host.
SIZES = (32, 64, 96, 128, 192, 256, 384, 512)
REQUESTS = 16  # of a pass, at most

# With experts also of these, of which at most a fifth is padding. A layer of Qwen3.6-35B-A3B takes
# an H200 0.7 to 2.3 ms, and its host 1.7 to 2.7.
LARGER_SIZES = (640, 800, 1024, 1280, 1600, 2048, 2560, 3200, 4096, 5120, 6400, 8192)
LEAST_FREE = 6 << 30  # bytes of the device; with fewer free there are none of the larger ones

# What a pass leaves out of its graphs: made with the context of its prompts, of their rows.
Apart: TypeAlias = Callable[..., Tensor]


class Hole(NamedTuple):
    """Between two graphs."""

    made: Apart
    given: Sequence[Tensor]  # [size, ...] each, which the graph before it leaves
    out: Tensor  # [size, ...], where the next graph reads it

    def fill(self, ctx: PrefillContext, n: int) -> None:
        """ctx: of n tokens."""
        self.out[:n].copy_(self.made(ctx, *(part[:n] for part in self.given)))
        self.out[n:].zero_()


class _Memory:
    """That of a tensor, as others than torch see it."""

    def __init__(self, x: Tensor) -> None:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        size = (last + 1) * x.itemsize
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def borrowed(x: Tensor) -> Tensor:
    """The same numbers in memory that is not kept for them: once ``x`` is gone, graphs that are
    captured later may use it, which is right where they are repeated later, too."""
    return (
        torch.as_tensor(_Memory(x), device=x.device).view(x.dtype).as_strided(x.shape, x.stride())
    )


class PromptPass(ForwardContext):
    """The graphs of a pass over up to ``size`` tokens; the context of what is captured."""

    def __init__(self, size: int, adapted: bool, graphs: PromptGraphs, ctx: PrefillContext) -> None:
        """adapted: whether rows may have adapters. ctx: of one request of ``size`` tokens, in slots
        of padding."""
        self.size, self.graphs, self.model = size, graphs, graphs.step.model
        self.tokens, self.positions = graphs.step.backend.place.to_device([[0] * size] * 2)
        self.adapters = torch.full_like(self.tokens, -1) if adapted else None  # slots, by row
        self.recurrence = ctx.fixed(size, REQUESTS)
        self.window, self.stages = Window(), graphs.step.chooser.stages
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self.holes: list[Hole] = []
        self.at_once: tuple[PrefillContext, int] | None = None
        self.once(ctx, size)  # loads kernels
        self.record()

    # ── what is captured ──

    def once(self, ctx: PrefillContext, n: int) -> None:
        """``replay`` without graphs."""
        self.at_once = ctx, n
        self._pass()
        self.at_once = None

    def _pass(self) -> None:
        with self.stages.through(self.window), reading(self.adapters):
            self.features = self.model(self.tokens, self)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        if self.recurrence is not None:
            return self.recurrence.recur(layer, channels, raw)
        shape = (self.size, layer.config.inner_size)
        return self._hole(lambda ctx, *rows: ctx.recur(layer, *rows), shape, channels, raw)

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._hole(lambda ctx, *rows: ctx.attention(layer, *rows), q.shape, q, k, v)

    def _hole(self, made: Apart, shape: Sequence[int], *given: Tensor) -> Tensor:
        out = torch.empty(shape, dtype=given[0].dtype, device=given[0].device)
        if self.at_once is not None:
            Hole(made, given, out).fill(*self.at_once)
            return out
        self.pieces[-1].capture_end()
        self.holes.append(Hole(made, [borrowed(x) for x in given], borrowed(out)))
        self._begin()
        return out

    def record(self) -> None:
        torch.cuda.synchronize(self.tokens.device)
        with torch.cuda.stream(self.graphs.stream):
            self._begin()
            try:
                self._pass()
            finally:
                self.pieces[-1].capture_end()

    def _begin(self) -> None:
        self.pieces.append(torch.cuda.CUDAGraph())
        # other threads may use the device meanwhile
        self.pieces[-1].capture_begin(pool=self.graphs.pool, capture_error_mode="thread_local")

    # ── what is repeated ──

    def replay(self, ctx: PrefillContext, n: int) -> None:
        for i, piece in enumerate(self.pieces):
            piece.replay()
            if i < len(self.holes):
                self.holes[i].fill(ctx, n)

    def over(self, tokens: Tensor, ctx: PrefillContext) -> Tensor:
        """tokens [n] int64 of the prompts of ``ctx`` -> features [n, F]."""
        n, arrives = len(tokens), self.window.arrives
        self.tokens[:n] = tokens
        if self.adapters is not None and (slots := slots_of_rows()) is not None:
            self.adapters[:n], self.adapters[n:] = slots, -1
        if self.model.rotary is not None:
            self.positions[:n] = ctx.positions
        if self.recurrence is not None:
            self.recurrence.show(ctx.parts)
        if arrives is not None:
            arrives[:n] = self.stages.take(arrives[:n])
        self.replay(ctx, n)
        if self.window.leaves is not None:
            self.stages.hand_on(self.window.leaves[:n].clone())
        return self.features[:n].clone()


class PromptGraphs:
    """Passes by size; none before ``capture``, and then those of more tokens are not captured."""

    def __init__(self, step: DecodeStep, pool: StatePool) -> None:
        self.step, self.pool_of_states = step, pool
        self.passes: list[PromptPass] = []  # the largest first

    @torch.inference_mode()
    def capture(self, padded_slot: int, most: int) -> None:
        """padded_slot: a request slot that no request gets. most: tokens of the larger passes."""
        began = time.perf_counter()
        self.pool = torch.cuda.graph_pool_handle()
        step, table, kv = self.step, self.step.table, self.step.kv
        self.stream = torch.cuda.Stream(step.backend.device)
        table.kv_slots[padded_slot].fill_(kv.padding_slot)
        larger = LARGER_SIZES if step.model.config.moe is not None else ()
        sizes = [*SIZES, *(size for size in larger if size <= most)]
        for size in reversed([size for size in sizes if size <= table.kv_slots.shape[1]]):
            item = PrefillItem(
                slot=padded_slot,
                state_slot=len(self.pool_of_states.feature) - 1,
                start=0,
                token_ids=indices([0] * size),
                kv_slots=indices([kv.padding_slot] * size),
            )
            has_both = step.adapters.num_slots > 0 and size in SIZES
            for adapted in (False, True) if has_both else (False,):
                ctx = self.context(prefill_parts([item]))
                self.passes.append(PromptPass(size, adapted, self, ctx))
        took = time.perf_counter() - began
        log.info("%d passes over prompts captured in %.1f s", len(self.passes), took)

    def context(self, parts: list[PrefillPart]) -> PrefillContext:
        step = self.step
        given = (self.pool_of_states, step.kv, step.table.kv_slots, step.model.config.recurrence)
        return step.backend.prefill_context(parts, *given)

    def features(self, tokens: Tensor, ctx: PrefillContext) -> Tensor | None:
        """Of a pass over prompts: tokens [n] int64 -> [n, F]. None: it is not captured."""
        adapted = slots_of_rows() is not None
        fitting = [
            each
            for each in self.passes
            if each.size >= len(tokens) and (each.adapters is not None) == adapted
        ]
        if not fitting:
            return None
        smallest = fitting[-1]
        if smallest.recurrence is not None and not smallest.recurrence.fits(ctx.parts):
            return None
        return smallest.over(tokens, ctx)

    def close(self) -> None:
        """Forget all graphs, once the device is done with them."""
        for each in self.passes:
            for piece in each.pieces:
                piece.reset()
        self.passes.clear()
