"""The recurrence of prompts as spans (vector_code.py), for programs (numba_team.py).

As in numba_spans.py, each is a loop over units that calls the kernel of a prompt pass, and its
arguments are words: the first is the address of the pass's ``PromptFrame``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mamba_eagle.kernels.causal_conv.cpu import convolve_token, save_history, step_sizes_of
from mamba_eagle.kernels.numba_math import kernel, numba
from mamba_eagle.kernels.numba_words import places, pointer_to
from mamba_eagle.kernels.ssd.cpu import CHUNK, SLACK, scan_head, scores_of
from mamba_eagle.kernels.vector_code import SpanKernel


class PromptFrame:
    """Words that all calls of a prompt pass read; the first two are those of ``Frame``."""

    STREAM, ROWS = 0, 1  # [n, hidden_size] float32, and n
    # tokens [n, 3] (kernels/causal_conv/cpu.py), requests [b, 3] and segments [S, 3] (of a
    # PrefillPlan), all int32, and their numbers
    TOKENS, REQUESTS, SEGMENTS, NUM_REQUESTS, NUM_SEGMENTS = range(2, 7)
    # Saved journals: [n] int64, the row that each token is kept in, or -1 (address 0: none is);
    # the rows of all layers, float32, [layers, rows, conv_dim] and [layers, rows, H]; rows
    KEPT, KEPT_INPUTS, KEPT_STEPS, KEPT_ROWS = range(7, 11)
    COUNT = 11


class PromptMixer:
    """Words of the spans of a layer's recurrence."""

    FRAME, PROJECTED, WIDTH, CONV, HEADS, LIMITS, HISTORY, STATE = range(8)
    # state slots; K, channels, H, P, N, G; the layer's index among those of its kind
    SLOTS, TAPS, CHANNELS, NUM_HEADS, HEAD_DIM, STATE_SIZE, GROUPS, LAYER = range(8, 16)
    CONVOLVED, STEPS, SCORES, OUT = range(16, 20)
    COUNT = 20


F, W = places(PromptFrame), places(PromptMixer)


class Pass(NamedTuple):
    """The arrays of a layer and of the pass."""

    projected: np.ndarray  # [n, columns]: gate, raw convolution inputs, raw step sizes, padding
    tokens: np.ndarray  # [n, 3]
    requests: np.ndarray  # [b, 3]
    segments: np.ndarray  # [S, 3]
    conv: np.ndarray  # [K + 1, C]
    heads: np.ndarray  # [3, H]: A, bias of the step size, D
    limits: np.ndarray  # [2]
    history: np.ndarray  # [slots, K-1, C]
    state: np.ndarray  # [slots, H, P, N]
    xBC: np.ndarray  # [n + SLACK, C]
    steps: np.ndarray  # [n, H]
    scores: np.ndarray  # [n, G, CHUNK]
    y: np.ndarray  # [n, H*P]


@kernel
def _pass(arguments):
    w = numba.carray(pointer_to(arguments), W.COUNT, np.int64)
    f = numba.carray(pointer_to(w[W.FRAME]), F.COUNT, np.int64)
    n, slots, K, channels = f[F.ROWS], w[W.SLOTS], w[W.TAPS], w[W.CHANNELS]
    H, P, N, G = w[W.NUM_HEADS], w[W.HEAD_DIM], w[W.STATE_SIZE], w[W.GROUPS]
    return Pass(
        numba.carray(pointer_to(w[W.PROJECTED]), (n, w[W.WIDTH]), np.float32),
        numba.carray(pointer_to(f[F.TOKENS]), (n, 3), np.int32),
        numba.carray(pointer_to(f[F.REQUESTS]), (f[F.NUM_REQUESTS], 3), np.int32),
        numba.carray(pointer_to(f[F.SEGMENTS]), (f[F.NUM_SEGMENTS], 3), np.int32),
        numba.carray(pointer_to(w[W.CONV]), (K + 1, channels), np.float32),
        numba.carray(pointer_to(w[W.HEADS]), (3, H), np.float32),
        numba.carray(pointer_to(w[W.LIMITS]), 2, np.float32),
        numba.carray(pointer_to(w[W.HISTORY]), (slots, K - 1, channels), np.float32),
        numba.carray(pointer_to(w[W.STATE]), (slots, H, P, N), np.float32),
        numba.carray(pointer_to(w[W.CONVOLVED]), (n + SLACK, channels), np.float32),
        numba.carray(pointer_to(w[W.STEPS]), (n, H), np.float32),
        numba.carray(pointer_to(w[W.SCORES]), (n, G, CHUNK), np.float32),
        numba.carray(pointer_to(w[W.OUT]), (n, H * P), np.float32),
    )


@kernel
def _keep(arguments, own, first, last):
    """Copy raw convolution inputs and step sizes of tokens [first, last) to saved journals."""
    w = numba.carray(pointer_to(arguments), W.COUNT, np.int64)
    f = numba.carray(pointer_to(w[W.FRAME]), F.COUNT, np.int64)
    if f[F.KEPT] == 0:
        return
    channels, H, rows = w[W.CHANNELS], w[W.NUM_HEADS], f[F.KEPT_ROWS]
    kept = numba.carray(pointer_to(f[F.KEPT]), f[F.ROWS], np.int64)
    of_inputs = f[F.KEPT_INPUTS] + 4 * w[W.LAYER] * rows * channels
    of_steps = f[F.KEPT_STEPS] + 4 * w[W.LAYER] * rows * H
    inputs = numba.carray(pointer_to(of_inputs), (rows, channels), np.float32)
    steps = numba.carray(pointer_to(of_steps), (rows, H), np.float32)
    begin = own.y.shape[1]
    for t in range(first, last):
        if kept[t] >= 0:
            row, raw = inputs[kept[t]], own.projected[t, begin : begin + channels]
            for c in range(channels):
                row[c] = raw[c]
            for h in range(H):
                steps[kept[t], h] = own.steps[t, h]


def _enter_tokens(arguments, first, last):
    """Tokens [first, last) of ``convolve_prompts`` and ``step_sizes``."""
    own = _pass(arguments)
    inner = own.y.shape[1]
    of_steps, bias = inner + own.conv.shape[1], own.heads[1]
    low, high = own.limits[0], own.limits[1]
    for t in range(first, last):
        convolve_token(t, own.projected, inner, own.conv, own.history, own.tokens, own.xBC)
        step_sizes_of(t, own.projected, of_steps, bias, low, high, own.steps)
    _keep(arguments, own, first, last)


def _save_histories(arguments, first, last):
    """Requests [first, last) of ``save_histories``."""
    own = _pass(arguments)
    inner = own.y.shape[1]
    for r in range(first, last):
        save_history(r, own.projected, inner, own.history, own.requests, own.segments)


def _score_tokens(arguments, first, last):
    """Tokens [first, last) of ``products``."""
    own = _pass(arguments)
    inner, N = own.y.shape[1], own.state.shape[3]
    for t in range(first, last):
        scores_of(t, own.xBC, inner, N, own.tokens, own.scores)


def _scan_heads(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``scan``."""
    own = _pass(arguments)
    rates, skip = own.heads[0], own.heads[2]
    for task in range(first, last):
        scan_head(
            task, own.xBC, own.steps, rates, skip, own.state, own.requests, own.segments,
            own.scores, own.y,
        )  # fmt: skip


ENTER_TOKENS, SAVE_HISTORIES = SpanKernel(_enter_tokens), SpanKernel(_save_histories)
SCORE_TOKENS, SCAN_HEADS = SpanKernel(_score_tokens), SpanKernel(_scan_heads)
