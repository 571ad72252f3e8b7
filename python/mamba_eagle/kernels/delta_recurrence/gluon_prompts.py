"""Gated DeltaNet over prompts of several requests, from and to state slots, in one kernel.

A program walks over the tokens of a request with some of a head's values, on each of which a state
has a row of its own. The inputs of the next CHUNK tokens are copied to shared memory meanwhile.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.delta_recurrence.gluon_step import (
    MAX_KEY,
    advance,
    choose_tiles,
    prepare,
    room_for_tokens,
    write_output,
)
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence.gluon_prompts import CHUNK, load_state, walk
from mamba_eagle.kernels.recurrence.gluon_step import PLAIN, read_layout, tile_layout
from mamba_eagle.kernels.recurrence.layout import Tiles, check_sizes
from mamba_eagle.kernels.tree_verify.layout import Sizes


@gluon.jit
def _prepare(raw, stage, given, num_warps: gl.constexpr):
    tokens, EPS = given
    layout: gl.constexpr = read_layout(raw[0].shape[2], num_warps)
    of_values: gl.constexpr = read_layout(raw[2].shape[2], num_warps)
    q, k = raw[0].index(stage).load(layout), raw[1].index(stage).load(layout)
    g, beta = raw[3].index(stage).load(layout), raw[4].index(stage).load(layout)
    prepare(tokens, q, k, g, beta, EPS)
    tokens[0].store(raw[2].index(stage).load(of_values).to(gl.float32))


@gluon.jit
def _token(S, given, row, y):
    after, _ = advance(S[0], given[0], row)
    write_output(after, given[0], row, y)
    return (after,)


@gluon.jit
def _scan_kernel(
    convolved,  # [n, 2*G*N + H*P]: queries, keys, values
    gates,  # [n, H + H]: g, beta
    state,  # [slots, H, P, N]
    y,  # [n, H*P]
    requests,  # [b, 3]
    segments,  # [S, 3]
    state_stride,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
    EPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    WIDTH: gl.constexpr = 2 * G * N + H * P
    dtype: gl.constexpr = convolved.dtype.element_ty
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    raw = (
        gl.allocate_shared_memory(dtype, [2, CHUNK, N], PLAIN),
        gl.allocate_shared_memory(dtype, [2, CHUNK, N], PLAIN),
        gl.allocate_shared_memory(dtype, [2, CHUNK, TILE], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK, 1], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK, 1], PLAIN),
    )
    tokens = room_for_tokens(CHUNK, TILE, N)
    first = gl.program_id(0) * TILE
    request = gl.program_id(1)
    head = first // P
    queries = convolved + head // (H // G) * N
    reads = (
        queries,
        queries + G * N,
        convolved + 2 * G * N + first,
        gates + head,
        gates + H + head,
    )
    strides = (WIDTH, WIDTH, WIDTH, 2 * H, 2 * H)
    state += first * N
    segment = gl.load(requests + request * 3)
    last_segment = gl.load(requests + request * 3 + 1)
    source = gl.load(requests + request * 3 + 2).to(gl.int64)
    S = (load_state(state, source, state_stride, TILE, N, layout),)
    copies, bounds = (raw, reads, strides), (segment, last_segment)
    walk(
        S, state, y + first, segments, bounds, copies, (tokens, EPS), state_stride, H * P, _prepare,
        _token, num_warps,
    )  # fmt: skip


def scan(
    convolved: Tensor,
    gates: Tensor,
    state: Tensor,
    plan: PrefillPlan,
    sizes: Sizes,
    eps: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """The outputs of all tokens of a plan; states are read from slots and saved to slots.

    Args:
        convolved: [n, 2*G*N + H*P], contiguous: queries, keys and values.
        gates: [n, H + H] float32, contiguous: g and beta.
        state: [slots, H, P, N] float32, of one layer.
        eps: added to the squared norms of queries and keys.
        tiles: None: ``choose_tiles``. Bits do not depend on it.
    Returns: [n, H*P], dtype of ``convolved``.
    Raises: ValueError as ``check_sizes``.
    """
    check_sizes(sizes, state, MAX_KEY)
    tile, _, warps = tiles or choose_tiles(sizes)
    width = sizes.heads * sizes.head_dim
    y = torch.empty(len(convolved), width, dtype=convolved.dtype, device=convolved.device)
    _scan_kernel[(width // tile, len(plan.requests))](
        *(convolved, gates, state, y, plan.requests, plan.segments, state.stride(0)),
        **sizes.constants,
        TILE=tile,
        EPS=eps,
        num_warps=warps,
    )
    return y
