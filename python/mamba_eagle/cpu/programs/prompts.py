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
from mamba_eagle.cpu.programs.calls import Call, Scratch
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
from mamba_eagle.model_config import RecurrenceConfig

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
        first = self.call(spans.ENTER_TOKENS, own, work_per_row=entering_ns(c))
        describe_states(first, mixer, self.states)
        for name, columns_made in made_of(c).items():
            self.scratch.want(name, columns_made * 4)
        columns.describe(first)
        first.lies(convolved="convolved", steps="steps", decay="decay", out="y")
        # it overwrites what the convolution has read
        self.call(spans.SAVE_HISTORIES, own, units_per_row=0, units_per_request=1)
        self.call(
            spans.SCAN_HEADS, own,
            units_per_row=0, units_per_request=c.num_heads, work_per_row=scanning_ns(c),
        )  # fmt: skip


def made_of(c: RecurrenceConfig) -> dict[str, int]:
    """What is made of a token, by name: how many float32 numbers."""
    return {"convolved": c.conv_dim, "steps": c.gate_size, "decay": c.num_heads, "y": c.inner_size}


def entering_ns(c: RecurrenceConfig) -> int:
    """Nanoseconds that a token takes before its recurrence, on one core."""
    return c.conv_dim * 2 * NS_PER_NUMBER + c.num_heads * SOFTPLUS_NS


def scanning_ns(c: RecurrenceConfig) -> int:
    """The same in its recurrence."""
    return c.inner_size * 2 * c.state_size // PRODUCTS_PER_NS


def describe_states(call: Call, mixer: Mixer, states: StatePool) -> None:
    """The weights and sizes of a layer's recurrence, and its states."""
    history, state = (part[mixer.index].numpy() for part in (states.conv, states.ssm))
    call.keep(history=history, state=state)
    call.block.assign(states=state.shape[0], layer=mixer.index)
    describe_recurrence(call, mixer)


def divide(frame: abi.PromptFrame, tables: PromptTables) -> int:
    """Describes how the pass is divided; returns the number of requests."""
    assert all(table.dtype == np.int32 for table in tables)
    frame.point(**tables._asdict())
    frame.num_requests, frame.num_segments = len(tables.requests), len(tables.segments)
    return frame.num_requests


def recur_alone(
    mixer: Mixer, xbc: Tensor, raw: Tensor, states: StatePool, tables: PromptTables
) -> Tensor:
    """A layer's recurrence without a program: xbc [n, C], raw gates [n, E] -> [n, H*P]."""
    n, c, xbc, raw = len(xbc), mixer.config, xbc.contiguous(), raw.contiguous()
    frame = abi.PromptFrame(rows=n)
    requests = divide(frame, tables)
    own = abi.PromptRecurrence(frame=frame.address, columns=c.conv_dim, raw_columns=c.gate_size)
    call = Call(spans.ENTER_TOKENS, own)
    describe_states(call, mixer, states)
    made = {name: torch.empty(n, size) for name, size in made_of(c).items()}
    y = made.pop("y")
    own.point(projected=xbc, raw=raw, out=y, **made)
    spans.ENTER_TOKENS(n, n * entering_ns(c), own)
    spans.SAVE_HISTORIES(requests, 0, own)  # overwrites what the convolution has read
    spans.SCAN_HEADS(requests * c.num_heads, n * scanning_ns(c), own)
    return y


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
        frame, requests = self.frame, divide(self.frame, tables)
        frame.kept = 0
        if kept is not None:
            assert kept.inputs.dtype == torch.float32
            frame.point(kept=kept.rows, kept_inputs=kept.inputs, kept_steps=kept.gates)
            frame.kept_rows = kept.inputs.shape[1] * kept.inputs.shape[2]
        return requests
