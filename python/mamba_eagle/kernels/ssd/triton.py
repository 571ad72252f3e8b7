"""The chunked scan over prompts of several requests, from and to checkpoints, in one kernel.

A program owns TILE of the H*P channels of one request, with all N states of each: a tile of the
state that stays in registers while the program walks over the request's tokens, a chunk at a time.
Within a chunk the dual form is used (SSD, arXiv 2405.21060 section 6), as tree_verify.triton does
for a chain: all outputs, and the state after the chunk. So nothing but inputs, outputs and wanted
states touches memory, and a state is saved after any token by ending a chunk there. The order of
chunks costs no time where requests x tiles fill the device: a layer of 128 heads of 80 channels has
160 tiles of 64 to walk over even a single prompt.

Tiles are powers of two and P need not be: as in tree_verify.triton a tile may lie in two heads.

Precision: rows of 16 bits are exact operands, what multiplies them (the state, too) is split into
two such numbers. With float32 rows every product is made of three tf32 ones. Sums are float32, and
running sums of dt·A start again with each chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.triton_math import dual_weights, exact_dot, split_dot


class Config(NamedTuple):
    """How the work is cut; the result does not depend on it but for rounding."""

    tile: int  # channels: a power of two, at least 16, at most P; divides those of a group
    chunk: int  # tokens: a power of two, at least 16
    warps: int
    stages: int  # chunks on their way


@triton.jit
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
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    TWO_HEADS: tl.constexpr = P % TILE != 0
    first = tl.program_id(0) * TILE
    request = tl.program_id(1)
    group = first // (H // G * P)
    channel = first + tl.arange(0, TILE)
    head = first // P
    head_2 = (first + TILE - 1) // P
    in_first = (channel < (head + 1) * P)[:, None]
    n = tl.arange(0, N)
    token = tl.arange(0, CHUNK)  # of the chunk
    visible = token[:, None] <= token[None, :]
    own = token[:, None] == token[None, :]
    in_state = channel[:, None] * N + n[None, :]
    x += channel
    y += channel
    B += group * N + n
    C += group * N + n
    rate = tl.load(A + head)
    skip = tl.load(D + head)
    rate_2 = tl.load(A + head_2)
    skip_2 = tl.load(D + head_2)

    segment = tl.load(requests + request * 3)
    last_segment = tl.load(requests + request * 3 + 1)
    source = tl.load(requests + request * 3 + 2).to(tl.int64)
    before = tl.zeros([TILE, N], tl.float32)
    if source >= 0:
        before = tl.load(state + source * state_stride + in_state).to(tl.float32)

    for s in range(segment, last_segment):
        begin = tl.load(segments + s * 3).to(tl.int64)
        end = tl.load(segments + s * 3 + 1).to(tl.int64)
        slot = tl.load(segments + s * 3 + 2).to(tl.int64)
        for at in tl.range(begin, end, CHUNK, num_stages=STAGES):
            valid = token < end - at
            x_rows = x + at * x_stride
            B_rows = B + at * B_stride
            C_rows = C + at * C_stride
            # nothing is loaded past the end: dt = 0 there, which neither decays nor adds
            x_chunk = tl.load(
                x_rows[None, :] + (token * x_stride)[:, None], mask=valid[:, None], other=0.0
            )
            B_chunk = tl.load(
                B_rows[None, :] + (token * B_stride)[:, None], mask=valid[:, None], other=0.0
            )
            C_chunk = tl.load(
                C_rows[None, :] + (token * C_stride)[:, None], mask=valid[:, None], other=0.0
            )
            steps = dt + at * dt_token + token * dt_token
            step = tl.load(steps + head * dt_head, mask=valid, other=0.0)
            log = tl.cumsum(step * rate)
            end_log = tl.sum(step * rate)
            decay = tl.exp(log)[None, :]
            if TWO_HEADS:
                step_2 = tl.load(steps + head_2 * dt_head, mask=valid, other=0.0)
                log_2 = tl.cumsum(step_2 * rate_2)
                end_log_2 = tl.sum(step_2 * rate_2)
                decay = tl.where(in_first, decay, tl.exp(log_2)[None, :])

            C_chunk = tl.trans(C_chunk)  # [N, CHUNK]
            x_chunk = tl.trans(x_chunk)  # [TILE, CHUNK]
            out = split_dot(before, C_chunk, tl.zeros([TILE, CHUNK], tl.float32), PRECISION)
            out *= decay
            scores = tl.zeros([CHUNK, CHUNK], tl.float32)
            scores = exact_dot(B_chunk, C_chunk, scores, PRECISION)
            weights = dual_weights(log, log, step, skip, scores, visible, own)
            if TWO_HEADS:
                out = split_dot(tl.where(in_first, x_chunk, 0.0), weights, out, PRECISION)
                weights = dual_weights(log_2, log_2, step_2, skip_2, scores, visible, own)
                out = split_dot(tl.where(in_first, 0.0, x_chunk), weights, out, PRECISION)
            else:
                out = split_dot(x_chunk, weights, out, PRECISION)
            y_rows = y + at * (H * P)
            tl.store(y_rows[:, None] + (token * (H * P))[None, :], out, mask=valid[None, :])

            share = (tl.exp(end_log - log) * step)[None, :]  # of a token in the state after all
            through = tl.exp(end_log)
            if TWO_HEADS:
                share_2 = (tl.exp(end_log_2 - log_2) * step_2)[None, :]
                share = tl.where(in_first, share, share_2)
                through = tl.where(in_first, through, tl.exp(end_log_2))
            dtx = x_chunk.to(tl.float32) * share
            before = split_dot(dtx, B_chunk, before * through, PRECISION)
        if slot >= 0:
            tl.store(state + slot * state_stride + in_state, before)


def choose_config(
    heads: int, head_dim: int, groups: int, state_size: int, dtype: torch.dtype
) -> Config:
    """What compiles for Hopper with few spilled registers; not yet tuned by measurement."""
    channels = heads // groups * head_dim
    fitting = [t for t in (16, 32, 64) if t <= head_dim and channels % t == 0]
    if not fitting:
        raise ValueError(f"{channels} channels a group, {head_dim} a head: must be multiples of 16")
    if dtype == torch.float32:  # shared memory
        return Config(fitting[-1], 64, 4, 1)
    return Config(fitting[-1], 64, 8, 1) if state_size > 128 else Config(fitting[-1], 64, 4, 2)


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
) -> Tensor:
    """naive.scan_prompts. Does not wait for the device.

    Args:
        x: [n, H, P]; B, C: [n, G, N], of x's dtype; views with contiguous rows will do.
        dt: [n, H] float32, any strides, best with tokens side by side; A, D: [H] float32.
        state: [slots, H, P, N], the layer's part of the pool, contiguous; float32 or bfloat16.
    Returns: y [n, H*P], dtype of x.
    """
    n, H, P = x.shape
    G, N = B.shape[1:]
    config = config or choose_config(H, P, G, N, x.dtype)
    y = torch.empty(n, H * P, dtype=x.dtype, device=x.device)
    _scan_kernel[(H * P // config.tile, len(plan.requests))](
        x,
        B,
        C,
        dt,
        A,
        D,
        state,
        y,
        plan.requests,
        plan.segments,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        *dt.stride(),
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=config.tile,
        CHUNK=config.chunk,
        PRECISION="tf32" if x.dtype != torch.float32 else "tf32x3",
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return y
