"""The convolution of prompts of several requests in one pass on a CPU: float32.

Raw inputs may be columns of wider rows, which is where a projection leaves them: they begin at
column ``at``. ``tokens`` [n, 3] int32 says of each token which is the first one of its request, the
state slot that its request starts from (-1: zeros), and which is the first one of its chunk.
"""

from __future__ import annotations

from mamba_eagle.kernels.numba_math import kernel, prange, silu, softplus
from mamba_eagle.kernels.threads import threaded


@kernel
def _input(xbc, at, history, source, first, t):
    """The raw inputs of token t of a request whose first token is ``first``: [C]."""
    if t >= first:
        return xbc[t, at : at + history.shape[2]]
    return history[source, history.shape[1] + t - first]


@kernel
def convolve_token(t, xbc, at, conv, history, tokens, out):
    """Token t of ``convolve_prompts``."""
    K, channels = conv.shape[0] - 1, conv.shape[1]
    first, source = tokens[t, 0], tokens[t, 1]
    row, bias, taps, own = out[t], conv[K], conv[K - 1], xbc[t, at : at + channels]
    for c in range(channels):
        row[c] = bias[c] + taps[c] * own[c]
    for tap in range(K - 1):
        before = t + tap - (K - 1)
        if before < first and source < 0:
            continue  # zeros
        taps, earlier = conv[tap], _input(xbc, at, history, source, first, before)
        for c in range(channels):
            row[c] += taps[c] * earlier[c]
    for c in range(channels):
        row[c] = silu(row[c])


@threaded
def convolve_prompts(xbc, at, conv, history, tokens, out):
    """torch.py's conv_prompts, without the histories that it saves.

    xbc [n, at + C or more]; conv [K + 1, C]: the taps, the token's own last, then the bias; history
    [slots, K-1, C], only read; tokens [n, 3]. Out: out [n or more, C].
    """
    for t in prange(tokens.shape[0]):
        convolve_token(t, xbc, at, conv, history, tokens, out)


@kernel
def save_history(r, xbc, at, history, requests, segments):
    """Request r of ``save_histories``."""
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
def save_histories(xbc, at, history, requests, segments):
    """The last K-1 raw inputs of each segment that ends where a state is saved: history [slots,
    K-1, C]; requests, segments: of a PrefillPlan. Call it after the convolution has read them."""
    for r in range(requests.shape[0]):
        save_history(r, xbc, at, history, requests, segments)


@kernel
def step_sizes_of(t, raw, at, bias, low, high, out):
    """Token t of ``step_sizes``, whose raw numbers begin at column ``at``."""
    for h in range(out.shape[1]):
        out[t, h] = min(max(softplus(raw[t, at + h] + bias[h]), low), high)


@threaded
def step_sizes(raw, bias, low, high, out):
    """out [n, H] = clamp(softplus(raw + bias)), a number at a time, as decode steps compute it:
    torch rounds the last few of a tensor in another way, so a token's would depend on the batch.

    raw [n, H]; bias [H]; low, high float32.
    """
    for t in prange(out.shape[0]):
        step_sizes_of(t, raw, 0, bias, low, high, out)
