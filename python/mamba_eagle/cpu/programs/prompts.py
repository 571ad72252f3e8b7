"""Prompts through several layers as one program, without Python between their kernels (layers.py).

Short prompts are common: a turn of a chat, the end of one whose beginning is cached. Without
programs 8 tokens of the embedded model took a fifth longer, 64 a seventh. Attention of prompts is
torch's, so it runs between two programs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import KeptInputs
from mamba_eagle.cpu import abi
from mamba_eagle.cpu.programs.calls import Scratch
from mamba_eagle.cpu.programs.layers import (
    NS_PER_NUMBER,
    Builder,
    Columns,
    describe_recurrence,
    parts_of,
)
from mamba_eagle.cpu.spans import prompts as spans
from mamba_eagle.cpu.weights import Mixer
from mamba_eagle.layers.adapters import slots_of_rows

# Tokens of a pass beyond which its layers run one by one: the scratch, which stays, grows with the
# tokens, and the share of Python in the time falls.
MOST_TOKENS = 256
PRODUCTS_PER_NS = 30  # multiply-adds of the recurrence
SOFTPLUS_NS = 20


class PromptTables(NamedTuple):
    """How a pass is divided among requests, int32 and contiguous: see ``abi.PromptFrame``."""

    tokens: np.ndarray  # [n, 2]
    requests: np.ndarray  # [b, 3]
    segments: np.ndarray  # [S, 3]


class PromptBuilder(Builder):
    """Collects the calls of neighbouring layers; states are read from and saved to state slots."""

    about = "layers of a prompt"

    def __init__(
        self,
        frame: abi.PromptFrame,
        states: StatePool,
        scratch: Scratch,
        row_slots: abi.RowSlots | None,
    ) -> None:
        """scratch: that of all programs for prompts, which run one after the other."""
        super().__init__(frame, None, None, row_slots)
        self.states, self.scratch = states, scratch

    def recur(self, mixer: Mixer, columns: Columns) -> None:
        c, own = mixer.config, abi.PromptRecurrence()
        entering = c.conv_dim * 2 * NS_PER_NUMBER + c.num_heads * SOFTPLUS_NS
        first = self.call(spans.ENTER_TOKENS, own, work_per_row=entering)
        self._describe(first, mixer, columns)
        # it overwrites what the convolution has read
        self.call(spans.SAVE_HISTORIES, own, units_per_row=0, units_per_request=1)
        scanning = c.inner_size * 2 * c.state_size // PRODUCTS_PER_NS
        self.call(
            spans.SCAN_HEADS, own,
            units_per_row=0, units_per_request=c.num_heads, work_per_row=scanning,
        )  # fmt: skip

    def _describe(self, call: Any, mixer: Mixer, columns: Columns) -> None:
        """The block of a layer's recurrence."""
        c, at = mixer.config, mixer.index
        history, state = (part[at].numpy() for part in (self.states.conv, self.states.ssm))
        call.keep(history=history, state=state)
        call.block.assign(states=state.shape[0], layer=at)
        describe_recurrence(call, mixer)
        for name, per_row in (
            ("convolved", c.conv_dim * 4),
            ("steps", c.gate_size * 4),
            ("decay", c.num_heads * 4),
            ("y", c.inner_size * 4),
        ):
            self.scratch.want(name, per_row)
        columns.describe(call)
        call.lies(convolved="convolved", steps="steps", decay="decay", out="y")


class PromptPrograms:
    """A backend's programs for prompts, by the pool that has their states and the layers that they
    run. All share one scratch."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        """most: tokens of a pass; with more, layers run one by one."""
        self.most = most
        self.scratch = Scratch()
        self.frame, self.row_slots = abi.PromptFrame(), abi.RowSlots()
        # a pool that is no longer there leaves nothing here
        self._made: WeakKeyDictionary[StatePool, dict[tuple[nn.Module, int, bool], Any]]
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
            tables: None if there is no recurrent layer.
            kept: what else the pass writes to saved journals.
        """
        n = hidden.shape[0]
        if not layers or n > self.most or hidden.dtype != torch.float32:
            return None
        made = self._made.setdefault(pool, {})
        adapted = (slots := slots_of_rows()) is not None
        key = (layers[0], len(layers), adapted)  # both ends of a slice of a model's own layers
        if key not in made:
            made[key] = self._parts(layers, pool, adapted)
        if made[key] is None:
            return None
        if n > self.scratch.rows:
            self.scratch.grow(max(n, min(2 * self.scratch.rows, self.most)))
        hidden = hidden.contiguous()
        if slots is not None:
            self.row_slots.point(slots=slots)
        requests = 0 if tables is None else self._describe(tables, kept)
        for part in made[key]:
            hidden = part(hidden, ctx, requests, 0)
        return hidden

    def _parts(
        self, layers: Sequence[nn.Module], pool: StatePool, adapted: bool
    ) -> list[Any] | None:
        self.scratch.rows = 0  # new calls may want more per row
        slots = self.row_slots if adapted else None
        return parts_of(layers, lambda: PromptBuilder(self.frame, pool, self.scratch, slots))

    def _describe(self, tables: PromptTables, kept: KeptInputs | None) -> int:
        """Returns the number of requests."""
        frame, b = self.frame, len(tables.requests)
        assert all(table.dtype == np.int32 for table in tables)
        frame.point(**tables._asdict())
        frame.num_requests, frame.num_segments, frame.kept = b, len(tables.segments), 0
        if kept is not None:
            assert kept.inputs.dtype == torch.float32
            frame.point(kept=kept.rows, kept_inputs=kept.inputs, kept_steps=kept.gates)
            frame.kept_rows = kept.inputs.shape[1] * kept.inputs.shape[2]
        return b
