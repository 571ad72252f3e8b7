"""The recurrence of prompts as spans (span_kernels.py), for programs (team.py) and for
layers that run one by one.

As in spans/layers.py, each is a loop over units that calls the kernel of a prompt pass; its block
names the pass's ``PromptFrame``.
"""

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import floats, ints, reader
from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.cpu.ops.causal_conv import convolve_token, save_history, step_sizes_of
from mamba_eagle.cpu.ops.delta_gates import arrange_token
from mamba_eagle.cpu.ops.ssd import scan_head
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vector_math import copy_row
from mamba_eagle.machine_code import kernel, numba

own_at, frame_at = reader(abi.PromptRecurrence), reader(abi.PromptFrame)


@kernel
def _tables(address, shape):
    return numba.carray(pointer_to(address), shape, np.int32)


@kernel
def _divided(frame):
    """How the pass is divided: ``requests`` and ``segments`` of a PrefillPlan."""
    requests = _tables(frame.requests, (frame.num_requests, 3))
    return requests, _tables(frame.segments, (frame.num_segments, 3))


@kernel
def _raw_inputs(own, n):
    """Rows with raw convolution inputs, and those before each state: [slots, K-1, C]."""
    history = floats(own.history, (own.states, own.K - 1, own.channels))
    return floats(own.projected, (n, own.columns)), history


@kernel
def _made(own, n):
    """What tokens feed into the recurrence: [n, C], [n, E], [n, H]."""
    steps, decay = floats(own.steps, (n, own.E)), floats(own.decay, (n, own.H))
    return floats(own.convolved, (n, own.channels)), steps, decay


@kernel
def _keep(own, frame, projected, steps, first, last):
    """Copy raw convolution inputs and step sizes of tokens [first, last) to saved journals."""
    if frame.kept == 0:
        return
    channels, E, rows, begin = own.channels, own.E, frame.kept_rows, own.channels_at
    kept = ints(frame.kept, frame.rows)
    kept_inputs = floats(frame.kept_inputs + 4 * own.layer * rows * channels, (rows, channels))
    kept_steps = floats(frame.kept_steps + 4 * own.layer * rows * E, (rows, E))
    for t in range(first, last):
        if kept[t] >= 0:
            copy_row(projected[t, begin : begin + channels], kept_inputs[kept[t]])
            copy_row(steps[t], kept_steps[kept[t]])


def _enter_tokens(arguments, first, last):
    """What tokens [first, last) feed into the recurrence."""
    own = own_at(arguments)
    frame = frame_at(own.frame)
    n, at, gates_at, low, high = frame.rows, own.channels_at, own.gates_at, own.low, own.high
    (projected, history), (xBC, steps, decay) = _raw_inputs(own, n), _made(own, n)
    raw, tokens = floats(own.raw, (n, own.raw_columns)), _tables(frame.tokens, (n, 2))
    conv, heads = floats(own.conv, (own.K + 1, own.channels)), floats(own.heads, (3, own.H))
    for t in range(first, last):
        convolve_token(t, projected, at, conv, history, tokens, xBC)
        if own.E > own.H:  # a delta rule
            arrange_token(xBC[t], own.N, own.H * own.P)
        step_sizes_of(t, raw, gates_at, heads, low, high, steps, decay)
    _keep(own, frame, projected, steps, first, last)


def _save_histories(arguments, first, last):
    """Raw inputs before the saved states of requests [first, last)."""
    own = own_at(arguments)
    frame = frame_at(own.frame)
    (projected, history), (requests, segments) = _raw_inputs(own, frame.rows), _divided(frame)
    for r in range(first, last):
        save_history(r, projected, own.channels_at, history, requests, segments)


def _scan_heads(arguments, first, last):
    """States and outputs of pairs [first, last) of a request and a head."""
    own = own_at(arguments)
    frame = frame_at(own.frame)
    n, H, P = frame.rows, own.H, own.P
    (xBC, steps, decay), (requests, segments) = _made(own, n), _divided(frame)
    state, y = floats(own.state, (own.states, H, P, own.N)), floats(own.out, (n, H * P))
    skip = floats(own.heads, (3, H))[2]
    for task in range(first, last):
        scan_head(task, xBC, steps, decay, skip, state, requests, segments, y)


ENTER_TOKENS, SAVE_HISTORIES = SpanKernel(_enter_tokens), SpanKernel(_save_histories)
SCAN_HEADS = SpanKernel(_scan_heads)
