"""The convolution of prompts of several requests in one pass on a CPU: float32.

Raw inputs may be columns of wider rows, which is where a projection leaves them: they begin at
column ``at``. ``tokens`` [n, 2] int32 says of each token which is the first one of its request, and
the state slot that its request starts from (-1: zeros).
"""

import numpy as np

from mamba_eagle.cpu.ops.delta_gates import delta_gates
from mamba_eagle.cpu.threads import threaded
from mamba_eagle.cpu.vector_math import silu, softplus
from mamba_eagle.cpu.vectors.states import decay_of
from mamba_eagle.cpu.vectors.sums import LANES, add_taps
from mamba_eagle.machine_code import kernel, prange, strictly


@kernel
def _input(xbc, at, history, source, first, t):
    """The raw inputs of token t of a request whose first token is ``first``: [C]."""
    if t >= first:
        return xbc[t, at : at + history.shape[2]]
    return history[source, history.shape[1] + t - first]


@strictly
def convolve_row(out, conv, inputs, places):  # noqa: ANN001, ANN201
    """out [C] = silu(bias + Σ taps · inputs), with the same bits for a token of a prompt and for a
    node of a tree.

    conv [K + 1, C]; inputs: contiguous, of which a token's begin at element places[k]; places [K],
    the token itself first.
    """
    K, C, numbers = len(places), len(out), inputs.reshape(inputs.size)
    add_taps(out, conv, C, inputs, places, K)
    for c in range(C // LANES * LANES, C):
        total = conv[K, c]
        for k in range(K):
            total += conv[K - 1 - k, c] * numbers[places[k] + c]
        out[c] = total
    for c in range(C):
        out[c] = silu(out[c])


@kernel
def convolve_token(t, xbc, at, conv, history, tokens, out):
    """torch.py's conv_prompts for token t, without the histories that it saves.

    xbc [n, at + C or more]; conv [K + 1, C]: the taps, the token's own last, then the bias; history
    [slots, K-1, C], only read; tokens [n, 2]. Out: out [n or more, C].
    """
    K, channels = conv.shape[0] - 1, conv.shape[1]
    first, source = tokens[t, 0], tokens[t, 1]
    if t - (K - 1) >= first:
        last = t * xbc.shape[1] + at
        convolve_row(out[t], conv, xbc, last - np.arange(K) * xbc.shape[1])
        return
    window = np.zeros((K, channels), np.float32)  # the token itself first
    for k in range(K):
        if t - k >= first or source >= 0:
            earlier = _input(xbc, at, history, source, first, t - k)
            for c in range(channels):
                window[k, c] = earlier[c]
    convolve_row(out[t], conv, window, np.arange(K) * channels)


@kernel
def save_history(r, xbc, at, history, requests, segments):
    """Of request r, the last K-1 raw inputs of each segment that ends where a state is saved:
    history [slots, K-1, C]; requests, segments: of a PrefillPlan. Call it after the convolution has
    read them."""
    width = history.shape[1]
    first, source = segments[requests[r, 0], 0], requests[r, 2]
    for s in range(requests[r, 0], requests[r, 1]):
        end, slot = segments[s, 1], segments[s, 2]
        if slot < 0:
            continue
        for k in range(width):  # no source is below its target
            before = end - width + k
            kept = history[slot, k]
            if before < first and source < 0:
                for c in range(kept.shape[0]):
                    kept[c] = 0.0
            else:
                raw = _input(xbc, at, history, source, first, before)
                for c in range(kept.shape[0]):
                    kept[c] = raw[c]


@kernel
def step_sizes_of(t, raw, at, heads, low, high, out, decay):
    """Token t of ``step_sizes``, whose raw numbers begin at column ``at``."""
    if out.shape[1] > decay.shape[1]:
        delta_gates(raw[t, at : at + out.shape[1]], heads, high, out[t], decay[t])
        return
    for h in range(out.shape[1]):
        out[t, h] = min(max(softplus(raw[t, at + h] + heads[1, h]), low), high)
        decay[t, h] = decay_of(out[t, h], heads[0, h])


@threaded
def step_sizes(raw, heads, low, high, out, decay):
    """out [n, H] = clamp(softplus(raw + bias)), decay [n, H] = exp(out A), a number at a time, as
    decode steps compute them: torch rounds the last few of a tensor in another way, so a token's
    would depend on the batch.

    Of a delta rule ``delta_gates`` of each: then raw and out are [n, 2 H].

    raw [n, H]; heads [3, H]: A, bias, D; low, high float32.
    """
    for t in prange(out.shape[0]):
        step_sizes_of(t, raw, 0, heads, low, high, out, decay)
