"""The convolution of prompts of several requests in one pass on a CPU: float32."""

from __future__ import annotations

from mamba_eagle.kernels.numba_math import kernel, prange, silu, softplus
from mamba_eagle.kernels.threads import threaded


@kernel
def _input(xbc, history, requests, r, first, t):
    """The raw inputs of token t of request r, whose first token is ``first``: [C]."""
    if t >= first:
        return xbc[t]
    return history[requests[r, 2], history.shape[1] + t - first]


@threaded
def convolve_prompts(xbc, conv, history, requests, segments, blocks, block, out):
    """torch.py's conv_prompts, without the histories that it saves.

    xbc [n, C]; conv [K + 1, C]: the taps, the token's own last, then the bias; history [slots, K-1,
    C], only read; requests, segments, blocks: of a PrefillPlan, ``block`` tokens per block. Out:
    out [n, C].
    """
    K = conv.shape[0] - 1
    for k in prange(blocks.shape[0]):
        r, begin = blocks[k, 0], blocks[k, 1]
        first = segments[requests[r, 0], 0]
        end = min(begin + block, segments[requests[r, 1] - 1, 1])
        for t in range(begin, end):
            row, bias, taps, own = out[t], conv[K], conv[K - 1], xbc[t]
            for c in range(row.shape[0]):
                row[c] = bias[c] + taps[c] * own[c]
            for tap in range(K - 1):
                before = t + tap - (K - 1)
                if before < first and requests[r, 2] < 0:
                    continue  # zeros
                taps, earlier = conv[tap], _input(xbc, history, requests, r, first, before)
                for c in range(row.shape[0]):
                    row[c] += taps[c] * earlier[c]
            for c in range(row.shape[0]):
                row[c] = silu(row[c])


@kernel
def save_histories(xbc, history, requests, segments):
    """The last K-1 raw inputs of each segment that ends where a state is saved: history [slots,
    K-1, C]. Call it after the convolution has read them."""
    width = history.shape[1]
    for r in range(requests.shape[0]):
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
                    raw = _input(xbc, history, requests, r, first, before)
                    for c in range(kept.shape[0]):
                        kept[c] = raw[c]


@threaded
def step_sizes(raw, bias, low, high, out):
    """out [n, H] = clamp(softplus(raw + bias)), a number at a time, as decode steps compute it:
    torch rounds the last few of a tensor in another way, so a token's would depend on the batch.

    raw [n, columns], the first H of which are read; bias [H]; low, high float32.
    """
    for t in prange(out.shape[0]):
        for h in range(out.shape[1]):
            out[t, h] = min(max(softplus(raw[t, h] + bias[h]), low), high)
