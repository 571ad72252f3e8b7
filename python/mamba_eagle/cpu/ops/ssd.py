"""The recurrence over prompts of several requests, from and to state slots, on a CPU: float32.

Threads share out pairs of a request and a head. Each keeps one state in its core's cache while it
walks over the request's tokens, and steps it token by token with the code of decode steps
(vectors/states.py). So a token's output and the state after it have the bits that they have in any
other piece of the prompt, behind any cached state and in a decode step; a chunked scan, which adds
up in an order that depends on where chunks begin, has others each time.
"""

import numpy as np

from mamba_eagle.cpu.ops.tree_verify import Nodes, Rows, _block_of, _pass, _room
from mamba_eagle.cpu.vector_math import copy_row
from mamba_eagle.cpu.vectors.states import AFTER
from mamba_eagle.machine_code import kernel

SPAN = 16  # tokens that go over a part of the state together, while it is in registers


@kernel
def _walk(h, xBC, dt, decay, D, S, begin, end, y):
    """Tokens [begin, end) of one head, whose state S [P, N] becomes that after them."""
    H, (P, N) = decay.shape[1], S.shape
    inputs, of_C = Rows(xBC, dt, decay), (xBC.shape[1] + H * P) // 2
    order, kept, parents = np.arange(SPAN), np.zeros(SPAN, np.int64), np.arange(SPAN) - 1
    parents[0] = 0
    room = _room(0, SPAN, P, _block_of(N, dt.shape[1], H))
    for at in range(begin, end, SPAN):
        last = min(at + SPAN, end)
        q = last - at
        chain = Nodes(parents[:q], order[:q], kept[:q], xBC[at:last, of_C:], D, y[at:last])
        _pass(S, h, inputs, np.arange(at, last), np.int64(0), AFTER, chain, room)


@kernel
def scan_head(task, xBC, dt, decay, D, state, requests, segments, y):
    """naive.py's scan_prompts for pair ``task`` of a request and a head, from and to state slots.

    xBC [n, H*P + 2*G*N] after the convolution; dt, decay [n, H]: after softplus, and exp(dt A); D
    [H]; state [slots, H, P, N]; requests [b, 3], segments [S, 3]: of a PrefillPlan. Out: y [n,
    H*P]. Of a delta rule xBC is what ``arrange_token`` leaves, and is written to; dt: its gates.
    """
    H, P, N = state.shape[1:]
    r, h = task // H, task % H
    S = np.zeros((P, N), np.float32)
    if requests[r, 2] >= 0:
        for p in range(P):
            copy_row(state[requests[r, 2], h, p], S[p])
    for s in range(requests[r, 0], requests[r, 1]):
        _walk(h, xBC, dt, decay, D, S, segments[s, 0], segments[s, 1], y)
        if segments[s, 2] >= 0:
            for p in range(P):
                copy_row(S[p], state[segments[s, 2], h, p])
