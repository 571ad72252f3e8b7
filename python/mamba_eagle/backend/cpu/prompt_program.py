"""Prompts through several layers as one program, without Python between their kernels (fused.py).

Short prompts are common: a turn of a chat, the end of one whose beginning is cached. Without
programs 8 tokens of the embedded model took a fifth longer, 64 a seventh. Attention of prompts is
torch's, so it runs between two programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.backend.cpu.calls import Scratch, table_of
from mamba_eagle.backend.cpu.fused import NS_PER_NUMBER, Builder, has_program, parts_of
from mamba_eagle.backend.cpu.state import layer_weights
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import KeptInputs
from mamba_eagle.kernels import numba_prompts as spans
from mamba_eagle.kernels.numba_prompts import PromptFrame, PromptMixer
from mamba_eagle.kernels.numba_team import Program
from mamba_eagle.kernels.ssd.cpu import CHUNK, SLACK
from mamba_eagle.layers.layer import Residual
from mamba_eagle.layers.mamba2 import Mamba2Mixer

# Tokens of a pass beyond which its layers run one by one: the scratch, which stays, grows with the
# tokens, and the share of Python in the time falls.
MOST_TOKENS = 256
PRODUCTS_PER_NS = 30  # multiply-adds of the scan and of its scores
SOFTPLUS_NS = 20


class PromptTables(NamedTuple):
    """How a pass is divided among requests, int32 and contiguous: see numba_prompts.PromptFrame."""

    tokens: np.ndarray  # [n, 3]
    requests: np.ndarray  # [b, 3]
    segments: np.ndarray  # [S, 3]


class PromptBuilder(Builder):
    """Collects the calls of neighbouring layers; states are read from and saved to state slots."""

    def __init__(self, frame: np.ndarray, states: StatePool, scratch: Scratch) -> None:
        """scratch: that of all programs for prompts, which run one after the other."""
        super().__init__(frame, None, None)
        self.states, self.scratch = states, scratch

    def recur(self, mixer: Mamba2Mixer, width: int) -> None:
        c = mixer.config
        words = [0] * PromptMixer.COUNT
        entering = c.conv_dim * 2 * NS_PER_NUMBER + c.num_heads * SOFTPLUS_NS
        first = self.call(spans.ENTER_TOKENS, words, work_per_row=entering)
        self._describe(first, mixer, width)
        scoring = c.num_groups * c.state_size * CHUNK // 2 // PRODUCTS_PER_NS
        scanning = c.inner_size * (2 * c.state_size + CHUNK // 2) // PRODUCTS_PER_NS
        for kernel, columns in (
            # it overwrites what the convolution has read
            (spans.SAVE_HISTORIES, {"units_per_row": 0, "units_per_request": 1}),
            (spans.SCORE_TOKENS, {"work_per_row": scoring}),
            (
                spans.SCAN_HEADS,
                {"units_per_row": 0, "units_per_request": c.num_heads, "work_per_row": scanning},
            ),
        ):
            call = self.call(kernel, list(first.words), **columns)
            call.scratch, call.kept = first.scratch, first.kept

    def _describe(self, call: Any, mixer: Mamba2Mixer, width: int) -> None:
        """The words of a layer's recurrence, but the frame's."""
        c, at, weights = mixer.config, PromptMixer, layer_weights(mixer)
        history, state = (part[mixer.index].numpy() for part in (self.states.conv, self.states.ssm))
        arrays = {
            at.CONV: np.ascontiguousarray(weights.conv),
            at.HEADS: np.ascontiguousarray(weights.heads),
            at.LIMITS: np.array([weights.low, weights.high], np.float32),
            at.HISTORY: history,
            at.STATE: state,
        }
        for place, array in arrays.items():
            assert array.dtype == np.float32 and array.flags.c_contiguous
            call.keep(place, array)
        sizes = {
            at.WIDTH: width,
            at.SLOTS: state.shape[0],
            at.TAPS: c.conv_kernel,
            at.CHANNELS: c.conv_dim,
            at.NUM_HEADS: c.num_heads,
            at.HEAD_DIM: c.head_dim,
            at.STATE_SIZE: c.state_size,
            at.GROUPS: c.num_groups,
            at.LAYER: mixer.index,
        }
        for place, size in sizes.items():
            call.words[place] = size
        made = {
            at.CONVOLVED: ("convolved", c.conv_dim * 4),
            at.STEPS: ("steps", c.num_heads * 4),
            at.SCORES: ("scores", c.num_groups * CHUNK * 4),
            at.OUT: ("y", c.inner_size * 4),
        }
        call.scratch[at.PROJECTED] = ("wide", 0)
        for place, (name, per_row) in made.items():
            self.scratch.want(name, per_row)
            call.scratch[place] = (name, 0)


class PromptRun:
    """Neighbouring layers as one program."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.frame, self.scratch, self.calls = builder.frame, builder.scratch, builder.calls
        self.program = Program(table_of(self.calls))
        self._blocks: Any = None  # those of the scratch that the calls know

    def __call__(self, hidden: Tensor, ctx: Any, requests: int, trees: int) -> Tensor:
        """hidden [n, hidden_size], which the result overwrites."""
        if self._blocks is not self.scratch.blocks:
            for call in self.calls:
                call.place(self.scratch)
            self._blocks = self.scratch.blocks
        n = hidden.shape[0]
        self.frame[PromptFrame.STREAM], self.frame[PromptFrame.ROWS] = hidden.data_ptr(), n
        self.program.run(n, requests, trees)
        return hidden


class PromptPrograms:
    """A backend's programs for prompts, by the pool that has their states and the layers that they
    run. All share one scratch."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        """most: tokens of a pass; with more, layers run one by one."""
        self.most = most
        self.scratch = Scratch()
        self.frame = np.zeros(PromptFrame.COUNT, np.int64)
        # a pool that is no longer there leaves nothing here
        self._made: WeakKeyDictionary[StatePool, dict[tuple[nn.Module, int], Any]]
        self._made = WeakKeyDictionary()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Within, layers run one by one, however short a pass is."""
        before, self.most = self.most, 0
        try:
            yield
        finally:
            self.most = before

    def run(
        self,
        layers: Sequence[nn.Module],
        hidden: Tensor,
        ctx: Any,
        pool: StatePool,
        tables: PromptTables | None,
        kept: KeptInputs | None,
    ) -> Tensor | None:
        """hidden [n, hidden_size], which may be overwritten, after these layers; None: they have to
        run one by one.

        Args:
            ctx: what layers without a program are called with.
            tables: None if there is no Mamba2 layer.
            kept: what else the pass writes to saved journals.
        """
        n = hidden.shape[0]
        if not layers or n > self.most or hidden.dtype != torch.float32:
            return None
        made = self._made.setdefault(pool, {})
        key = (layers[0], len(layers))  # both ends of a slice of a model's own layers
        if key not in made:
            made[key] = self._parts(layers, pool)
        if made[key] is None:
            return None
        if n + SLACK > self.scratch.rows:
            self.scratch.grow(max(n + SLACK, min(2 * self.scratch.rows, self.most + SLACK)))
        hidden = hidden.contiguous()
        requests = 0 if tables is None else self._describe(tables, kept)
        for part in made[key]:
            hidden = part(hidden, ctx, requests, 0)
        return hidden

    def _parts(self, layers: Sequence[nn.Module], pool: StatePool) -> list[Any] | None:
        self.scratch.rows = 0  # new calls may want more per row

        def fuses(step: Residual) -> bool:
            return has_program(step, False)

        return parts_of(
            layers, fuses, lambda: PromptBuilder(self.frame, pool, self.scratch), PromptRun
        )

    def _describe(self, tables: PromptTables, kept: KeptInputs | None) -> int:
        """Returns the number of requests."""
        frame, b = self.frame, len(tables.requests)
        for i, table in enumerate(tables):
            assert table.dtype == np.int32 and table.flags.c_contiguous
            frame[PromptFrame.TOKENS + i] = table.ctypes.data
        frame[PromptFrame.NUM_REQUESTS : PromptFrame.KEPT] = b, len(tables.segments)
        frame[PromptFrame.KEPT] = 0
        if kept is not None:
            inputs, steps = kept.inputs, kept.steps
            assert inputs.dtype == torch.float32 and inputs.is_contiguous()
            frame[PromptFrame.KEPT :] = (
                kept.rows.data_ptr(), inputs.data_ptr(), steps.data_ptr(),
                inputs.shape[1] * inputs.shape[2],
            )  # fmt: skip
        return b
