"""The recurrence of prompts as spans (span_kernels.py), for programs (team.py).

As in spans/layers.py, each is a loop over units that calls the kernel of a prompt pass; its block
names the pass's ``PromptFrame``.
"""

from typing import NamedTuple

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import floats, ints, reader
from mamba_eagle.cpu.ops.causal_conv import convolve_token, save_history, step_sizes_of
from mamba_eagle.cpu.ops.delta_gates import arrange_token
from mamba_eagle.cpu.ops.ssd import scan_head
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vectors.memory import pointer_to
from mamba_eagle.machine_code import kernel, numba

own_at, frame_at = reader(abi.PromptRecurrence), reader(abi.PromptFrame)


class Pass(NamedTuple):
    """The arrays of a layer and of the pass."""

    projected: np.ndarray  # [n, columns], with raw convolution inputs from column ``at`` on
    at: int
    raw: np.ndarray  # [n, raw_columns], with raw gates
    tokens: np.ndarray  # [n, 2]
    requests: np.ndarray  # [b, 3]
    segments: np.ndarray  # [S, 3]
    conv: np.ndarray  # [K + 1, C]
    heads: np.ndarray  # [3, H]: A, bias of the step size, D
    low: float  # limits of step sizes
    high: float
    history: np.ndarray  # [slots, K-1, C]
    state: np.ndarray  # [slots, H, P, N]
    xBC: np.ndarray  # [n, C]
    steps: np.ndarray  # [n, E]
    decay: np.ndarray  # [n, H]
    y: np.ndarray  # [n, H*P]


@kernel
def _pass(arguments):
    own = own_at(arguments)
    frame = frame_at(own.frame)
    n, channels = frame.rows, own.channels
    return Pass(
        floats(own.projected, (n, own.columns)),
        own.channels_at,
        floats(own.raw, (n, own.raw_columns)),
        _tables(frame.tokens, (n, 2)),
        _tables(frame.requests, (frame.num_requests, 3)),
        _tables(frame.segments, (frame.num_segments, 3)),
        floats(own.conv, (own.K + 1, channels)),
        floats(own.heads, (3, own.H)),
        own.low,
        own.high,
        floats(own.history, (own.states, own.K - 1, channels)),
        floats(own.state, (own.states, own.H, own.P, own.N)),
        floats(own.convolved, (n, channels)),
        floats(own.steps, (n, own.E)),
        floats(own.decay, (n, own.H)),
        floats(own.out, (n, own.H * own.P)),
    )


@kernel
def _tables(address, shape):
    return numba.carray(pointer_to(address), shape, np.int32)


@kernel
def _keep(arguments, own, first, last):
    """Copy raw convolution inputs and step sizes of tokens [first, last) to saved journals."""
    given = own_at(arguments)
    frame = frame_at(given.frame)
    if frame.kept == 0:
        return
    channels, E, rows = given.channels, given.E, frame.kept_rows
    kept = ints(frame.kept, frame.rows)
    inputs = floats(frame.kept_inputs + 4 * given.layer * rows * channels, (rows, channels))
    steps = floats(frame.kept_steps + 4 * given.layer * rows * E, (rows, E))
    begin = own.at
    for t in range(first, last):
        if kept[t] >= 0:
            row, raw = inputs[kept[t]], own.projected[t, begin : begin + channels]
            for c in range(channels):
                row[c] = raw[c]
            for h in range(E):
                steps[kept[t], h] = own.steps[t, h]


def _enter_tokens(arguments, first, last):
    """Tokens [first, last) of ``convolve_prompts`` and ``step_sizes``."""
    own = _pass(arguments)
    given, is_delta = own_at(arguments), own.steps.shape[1] > own.decay.shape[1]
    for t in range(first, last):
        convolve_token(t, own.projected, own.at, own.conv, own.history, own.tokens, own.xBC)
        if is_delta:
            arrange_token(own.xBC[t], given.N, own.y.shape[1])
        step_sizes_of(
            t, own.raw, given.gates_at, own.heads, own.low, own.high, own.steps, own.decay
        )  # fmt: skip
    _keep(arguments, own, first, last)


def _save_histories(arguments, first, last):
    """Requests [first, last) of ``save_histories``."""
    own = _pass(arguments)
    for r in range(first, last):
        save_history(r, own.projected, own.at, own.history, own.requests, own.segments)


def _scan_heads(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``scan``."""
    own = _pass(arguments)
    for task in range(first, last):
        scan_head(
            task, own.xBC, own.steps, own.decay, own.heads[2], own.state, own.requests,
            own.segments, own.y,
        )  # fmt: skip


ENTER_TOKENS, SAVE_HISTORIES = SpanKernel(_enter_tokens), SpanKernel(_save_histories)
SCAN_HEADS = SpanKernel(_scan_heads)
