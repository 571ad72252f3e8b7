"""The chunked scan over prompts of several requests, from and to state slots, in one kernel.

A program owns a tile of channels of one head of one request, with the N numbers of each channel's
state. They stay in registers while the program walks over the request's tokens chunk by chunk.
Within a chunk it uses the dual form (arXiv 2405.21060, section 6), as tree_verify/triton.py does
for a chain that folds: it gives all outputs, and the state after the chunk. So only inputs, outputs
and the states to be saved touch memory, and ending a chunk early saves the state after any token.

Tiles are powers of two; P need not be one. What remains of a head is a narrower tile with a program
of its own (80 = 64 + 16).

Precision: factors of an output with 16 bits are rounded to 16 bits. Factors of a state are not:
16-bit inputs are exact, and what multiplies them is split into two 16-bit numbers. With float32
inputs every product consists of three tf32 products. Sums are float32, and the running sum of dt·A
starts again in each chunk.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.triton_math import exact_dot, rounded_dot, split_dot


class Config(NamedTuple):
    """How the work is divided; the result depends on it by rounding only."""

    tile: int  # channels per program: a power of two, at least 16
    chunk: int  # tokens per chunk: a power of two, at least 16
    warps: int
    stages: int  # chunks in flight, at least 2: with 1 some kernels read outside their chunks


@triton.jit
def _walk(
    reads,  # the parameters of ``_scan_kernel`` up to its sizes
    head,
    first,  # channel of the head
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk over the tokens of a request with TILE channels of one head."""
    x, B, C, dt, A, D, state, y, requests, segments, round_keys, layer = reads[:12]
    x_stride, B_stride, C_stride, dt_token, dt_head, state_stride = reads[12:]
    request = tl.program_id(1)
    group = head // (H // G)
    channel = first + tl.arange(0, TILE)
    in_head = (channel < P)[None, :]
    n = tl.arange(0, N)
    token = tl.arange(0, CHUNK)  # of the chunk
    visible = token[:, None] >= token[None, :]
    own = token[:, None] == token[None, :]
    x += head * P
    y += head * P
    B += group * N
    C += group * N
    dt += head * dt_head
    state += head * P * N
    in_state = channel[None, :] * N + n[:, None]
    rate = tl.load(A + head) * 1.4426950408889634  # log2(e): decays are powers of two
    skip = tl.load(D + head)

    segment = tl.load(requests + request * 3)
    last_segment = tl.load(requests + request * 3 + 1)
    source = tl.load(requests + request * 3 + 2).to(tl.int64)
    before = tl.zeros([N, TILE], tl.float32)
    if source >= 0:
        start = state + source * state_stride + in_state
        before = tl.load(start, mask=in_head, other=0.0).to(tl.float32)

    # hoisting values out of these loops would cost more registers than it saves work
    for s in tl.range(segment, last_segment, disable_licm=True):
        begin = tl.load(segments + s * 3).to(tl.int64)
        end = tl.load(segments + s * 3 + 1).to(tl.int64)
        slot = tl.load(segments + s * 3 + 2).to(tl.int64)
        for at in tl.range(begin, end, CHUNK, num_stages=STAGES, disable_licm=True):
            # tokens past the end have dt = 0: they neither decay the state nor add to it
            valid = token < end - at
            inside = valid[:, None] & in_head
            x_rows = x + at * x_stride + (token * x_stride)[:, None]
            B_rows = B + at * B_stride + (token * B_stride)[:, None]
            C_rows = C + at * C_stride + (token * C_stride)[:, None]
            x_chunk = tl.load(x_rows + channel[None, :], mask=inside, other=0.0)
            B_chunk = tl.load(B_rows + n[None, :], mask=valid[:, None], other=0.0)
            C_chunk = tl.load(C_rows + n[None, :], mask=valid[:, None], other=0.0)
            steps = dt + at * dt_token + token * dt_token
            step = tl.load(steps, mask=valid, other=0.0)
            later = (token + 1 < end - at) & (token + 1 < CHUNK)
            next_step = tl.load(steps + dt_token, mask=later, other=0.0)

            log = tl.cumsum(step * rate)
            # masked before exp2: above the diagonal the difference is unbounded
            gap = tl.where(visible, log[:, None] - log[None, :], float("-inf"))
            scores = tl.zeros([CHUNK, CHUNK], tl.float32)
            scores = exact_dot(C_chunk, tl.trans(B_chunk), scores, PRECISION)
            weights = tl.exp2(gap) * step[None, :] * scores + tl.where(own, skip, 0.0)
            out = tl.zeros([CHUNK, TILE], tl.float32)
            out = rounded_dot(C_chunk, before, out, PRECISION) * tl.exp2(log)[:, None]
            out = rounded_dot(weights, x_chunk, out, PRECISION)
            y_rows = y + at * (H * P) + (token * (H * P))[:, None]
            tl.store(y_rows + channel[None, :], out, mask=inside)

            # summed from the end, so that the decays of the last tokens are exact
            share = tl.exp2(tl.cumsum(next_step * rate, reverse=True)) * step
            dtx = x_chunk.to(tl.float32) * share[:, None]
            before *= tl.exp2(tl.sum(step * rate))
            before = split_dot(tl.trans(B_chunk), dtx, before, PRECISION)
        if slot >= 0:
            kept = before
            if round_keys is not None:
                key, place = tl.load(round_keys + s), head * P * N + in_state
                kept = round_state(before, key, layer, place, state.dtype.element_ty)
            tl.store(state + slot * state_stride + in_state, kept, mask=in_head)


# not specialized: layers 1 and 16 should not need new machine code
@triton.jit(do_not_specialize=["layer"])
def _scan_kernel(
    x,  # [n, H*P], rows x_stride apart
    B,  # [n, G*N], rows B_stride apart
    C,  # [n, G*N], rows C_stride apart
    dt,  # [n, H], strides dt_token, dt_head
    A,  # [H]
    D,  # [H]
    state,  # [slots, H, P, N]
    y,  # [n, H*P]
    requests,  # [b, 3]
    segments,  # [S, 3]
    round_keys,  # [S]; None: to nearest
    layer,
    x_stride,
    B_stride,
    C_stride,
    dt_token,
    dt_head,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    REST: tl.constexpr,  # channels of the last tile, padded; 0 if TILE divides P
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILES: tl.constexpr = P // TILE  # whole tiles per head
    reads = (
        x, B, C, dt, A, D, state, y, requests, segments, round_keys, layer,
        x_stride, B_stride, C_stride, dt_token, dt_head, state_stride,
    )  # fmt: skip
    program = tl.program_id(0)
    if program < H * TILES:
        head, first = program // TILES, program % TILES * TILE
        _walk(reads, head, first, H, P, G, N, TILE, CHUNK, PRECISION, STAGES)
    elif REST:
        head, first = program - H * TILES, TILES * TILE
        _walk(reads, head, first, H, P, G, N, REST, CHUNK, PRECISION, STAGES)


def choose_config(head_dim: int, state_size: int, dtype: torch.dtype) -> Config:
    """Measured on an H100 for bfloat16, P = 80, N = 128; other sizes by analogy."""
    if head_dim < 16:
        raise ValueError(f"heads of {head_dim} channels: must have at least 16")
    if dtype == torch.float32:  # two warps: no warp-group products; four where two would spill
        return Config(16, 16, 4 if state_size > 128 else 2, 2)
    tile = min(64, 2 ** (head_dim.bit_length() - 1))
    return Config(tile, 64, 8 if state_size > 128 else 4, 2)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    plan: PrefillPlan,
    config: Config | None = None,
    round_keys: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    """torch.py's scan_prompts. Nothing waits for the device.

    Args:
        x: [n, H, P]; B, C: [n, G, N], of x's dtype; views with contiguous rows are fine.
        dt: [n, H] float32, any strides, fastest with a head's tokens contiguous; A, D: [H] float32.
        state: [slots, H, P, N], the layer's part of the pool, contiguous; float32, bfloat16
            or float16.
        round_keys: [S] int64, of the noise that rounds the state after each segment to 16 bits;
            None: to nearest. layer: part of that key.
    Returns: y [n, H*P], dtype of x.
    """
    n, H, P = x.shape
    G, N = B.shape[1:]
    config = config or choose_config(P, N, x.dtype)
    rest = P % config.tile and max(16, next_power_of_2(P % config.tile))
    tiles = cdiv(P, config.tile)
    y = torch.empty(n, H * P, dtype=x.dtype, device=x.device)
    _scan_kernel[(H * tiles, len(plan.requests))](
        *(x, B, C, dt, A, D, state, y, plan.requests, plan.segments, round_keys),
        *(layer, x.stride(0), B.stride(0), C.stride(0), *dt.stride(), state.stride(0)),
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=config.tile,
        REST=rest,
        CHUNK=config.chunk,
        PRECISION="tf32" if x.dtype != torch.float32 else "tf32x3",
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return y
