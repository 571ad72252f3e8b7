"""What precedes the scan, for all prompts of a batch: convolution, and Mamba2's step sizes.

One pass over in_proj's output, starting from the saved histories. x, B and C come out as views of
one tensor, dt with the tokens of a head next to each other, as ssd/triton.py reads them. Where a
state is saved, its history is written as well. A delta rule takes the convolution alone, or as its
heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.causal_conv.triton import ConvWeights
from mamba_eagle.kernels.gpu import cdiv
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.tree_verify.layout import Sizes
from mamba_eagle.kernels.triton_math import fused_sum, silu, step_sizes


@triton.jit
def _saved_history(given, prompt, channel, in_block, CONV_DIM: tl.constexpr, K: tl.constexpr):
    """Write the last K-1 raw inputs of each segment to the state slot that it names."""
    xbc, history, segments, xbc_stride, history_stride = given
    segment, last_segment, source, first, known = prompt
    for s in range(segment, last_segment):
        end = tl.load(segments + s * 3 + 1)
        slot = tl.load(segments + s * 3 + 2).to(tl.int64)
        if slot >= 0:
            back = K - 1 - tl.arange(0, triton.next_power_of_2(K - 1))[:, None]
            token = end - back
            from_prompt = xbc + token.to(tl.int64) * xbc_stride
            from_past = history + source * history_stride + (K - 1 + token - first) * CONV_DIM
            start = tl.where(token >= first, from_prompt, from_past)
            wanted = (back > 0) & in_block
            value = tl.load(start + channel, mask=wanted & (token >= known), other=0.0)
            tl.debug_barrier()  # the slot may be the source: read all before writing any
            target = history + slot * history_stride + (K - 1 - back) * CONV_DIM
            tl.store(target + channel, value, mask=wanted)


@triton.jit
def _prompt_step_sizes(block, token, valid, steps, H: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    dt_raw, dt_bias, dt, n_stride, dt_stride, lowest, highest = steps
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    inside = valid[:, None] & (head < H)[None, :]
    place = token.to(tl.int64)[:, None] * dt_stride + head[None, :]
    raw = tl.load(dt_raw + place, mask=inside, other=0.0)
    bias = tl.load(dt_bias + head, mask=head < H, other=0.0)
    step = step_sizes(raw, bias, lowest, highest)
    tl.store(dt + head.to(tl.int64)[None, :] * n_stride + token[:, None], step, mask=inside)


@triton.jit(do_not_specialize=["n"])
def _steps_kernel(
    raw,  # [n, H], rows raw_stride apart
    dt_bias,  # [H]
    dt,  # [n, H]
    n,
    raw_stride,
    lowest,
    highest,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(0) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    inside = (token < n)[:, None] & (head < H)[None, :]
    given = tl.load(raw + token[:, None] * raw_stride + head[None, :], mask=inside, other=0.0)
    bias = tl.load(dt_bias + head, mask=head < H, other=0.0)
    step = step_sizes(given, bias, lowest, highest)
    tl.store(dt + token[:, None] * H + head[None, :], step, mask=inside)


def prompt_steps(raw: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """Step sizes alone, with the bits of ``prefill_conv``: raw [n, H] -> [n, H] float32."""
    n, H = raw.shape
    dt = torch.empty(n, H, dtype=torch.float32, device=raw.device)
    grid = (cdiv(H, 32), cdiv(n, 16))
    low, high = limit
    at = (raw, dt_bias, dt, n, raw.stride(0), float(low), float(high))
    _steps_kernel[grid](*at, H=H, TOKENS=16, HEAD_BLOCK=32)
    return dt


@triton.jit
def _prefill_conv_kernel(
    xbc,  # [n_stride, conv_dim], rows xbc_stride apart
    dt_raw,  # [n_stride, H], rows dt_stride apart; None: no step sizes
    conv_weight,  # [K, conv_dim]
    conv_bias,  # [conv_dim]
    dt_bias,  # [H]
    history,  # [slots, K-1, conv_dim]
    out,  # [n_stride, conv_dim]; if KEYS queries and keys [n_stride, KEYS] each, then values
    dt,  # [H, n], rows n_stride apart
    requests,  # [b, 3]
    segments,  # [S, 3]
    blocks,  # [·, 2]
    n_stride,
    xbc_stride,
    dt_stride,
    history_stride,
    lowest,
    highest,
    eps,  # added to squared norms
    H: tl.constexpr,
    CONV_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # channels of queries, in heads of BLOCK; 0: there are no heads
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    CHANNEL_BLOCKS: tl.constexpr = (CONV_DIM + BLOCK - 1) // BLOCK
    block = tl.program_id(0)
    request = tl.load(blocks + tl.program_id(1) * 2)
    at = tl.load(blocks + tl.program_id(1) * 2 + 1)
    segment = tl.load(requests + request * 3)
    last_segment = tl.load(requests + request * 3 + 1)
    source = tl.load(requests + request * 3 + 2).to(tl.int64)
    first = tl.load(segments + segment * 3)
    end = tl.load(segments + last_segment * 3 - 2)
    known = tl.where(source >= 0, first - (K - 1), first)  # before it, zeros
    token = at + tl.arange(0, TOKENS)
    valid = token < end
    if block < CHANNEL_BLOCKS:
        channel = block * BLOCK + tl.arange(0, BLOCK)
        in_block = channel < CONV_DIM
        inside = valid[:, None] & in_block[None, :]
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        if conv_bias is not None:
            bias = tl.load(conv_bias + channel, mask=in_block, other=0.0)
            total += bias.to(tl.float32)[None, :]
        for back in tl.static_range(0, K):
            # before the prompt, the history
            in_prompt = token - back >= first
            from_prompt = xbc + (token - back).to(tl.int64) * xbc_stride
            from_past = history + source * history_stride
            from_past += (K - 1 + token - back - first) * CONV_DIM
            start = tl.where(in_prompt, from_prompt, from_past)[:, None]
            there = inside & (token - back >= known)[:, None]
            value = tl.load(start + channel[None, :], mask=there, other=0.0)
            tap = conv_weight + (K - 1 - back) * CONV_DIM
            weight = tl.load(tap + channel, mask=in_block, other=0.0)
            total = fused_sum(value, weight[None, :], total)
        made, width, at_part = silu(total), CONV_DIM, tl.zeros([], tl.int64)
        if KEYS > 0:
            made = made.to(out.dtype.element_ty).to(tl.float32)  # as if written in between
            if block * BLOCK < 2 * KEYS:
                made *= tl.rsqrt(tl.sum(made * made, 1) + eps)[:, None]
            part = tl.minimum(block * BLOCK // KEYS, 2)
            width = tl.where(part < 2, KEYS, CONV_DIM - 2 * KEYS)
            at_part = part.to(tl.int64) * n_stride * KEYS - part * KEYS
        target = out + at_part + token.to(tl.int64)[:, None] * width + channel[None, :]
        tl.store(target, made, mask=inside)
        if at == first:  # the only program that reads the history of these channels
            given = (xbc, history, segments, xbc_stride, history_stride)
            prompt = (segment, last_segment, source, first, known)
            _saved_history(given, prompt, channel[None, :], in_block[None, :], CONV_DIM, K)
    else:
        if dt_raw is not None:
            steps = (dt_raw, dt_bias, dt, n_stride, dt_stride, lowest, highest)
            _prompt_step_sizes(block - CHANNEL_BLOCKS, token, valid, steps, H, HEAD_BLOCK)


class StepSizes(NamedTuple):
    """Mamba2's: of ``raw`` [n, H], which may be a view of in_proj's output, to ``dt``."""

    raw: Tensor | None
    dt: Tensor | None  # [H, n_stride] float32
    bias: Tensor | None  # [H]
    limit: tuple[float, float]


class ScanInputs(NamedTuple):
    """What ssd/triton.py's scan takes: views of one tensor, and dt by heads."""

    x: Tensor  # [n_stride, H, P]
    dt: Tensor  # [n_stride, H] float32; the tokens of a head are contiguous
    B: Tensor  # [n_stride, G, N]
    C: Tensor  # [n_stride, G, N]


def prefill_conv(
    xbc: Tensor,
    dt_raw: Tensor,
    weights: ConvWeights,
    history: Tensor,
    plan: PrefillPlan,
    sizes: Sizes,
    block: int = 256,
    warps: int = 4,
) -> ScanInputs:
    """naive.py's conv_prompts, split into x, B and C, and step sizes. Nothing waits for the device.

    Args:
        xbc: [n, conv_dim]; dt_raw: [n, H]; both may be views of in_proj's output.
        history: [slots, K-1, conv_dim], the layer's part of the pool, contiguous, dtype of xbc.
    """
    H, P, G, N = sizes
    n = plan.tokens
    # rows that begin at a multiple of 16: then prompts of any length take the same machine code
    dt = torch.empty(H, cdiv(n, 16) * 16, dtype=torch.float32, device=xbc.device)
    steps = StepSizes(dt_raw, dt, weights.dt_bias, weights.step_limit)
    taps = (weights.conv_weight, weights.conv_bias)
    out = conv_prompts(xbc, *taps, history, plan, steps, block, warps)
    x, B, C = out.split([H * P, G * N, G * N], dim=1)
    return ScanInputs(
        x.unflatten(1, (H, P)), dt[:, :n].t(), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    )


class Keys(NamedTuple):
    """Of a delta rule: heads of queries, and as many of keys, which are divided by their norms."""

    groups: int
    size: int  # a power of two
    eps: float  # added to squared norms


def conv_prompts(
    channels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor,
    plan: PrefillPlan,
    steps: StepSizes | None = None,
    block: int = 256,
    warps: int = 4,
    keys: Keys | None = None,
) -> Tensor:
    """naive.py's conv_prompts, which ends in SiLU. Nothing waits for the device.

    Args:
        channels: [n, conv_dim], last dimension contiguous. weight: [K, conv_dim]; bias [conv_dim].
        history: [slots, K-1, conv_dim], a layer's, contiguous, dtype of channels.
        steps: made in the same launch.
        keys: as ``conv_heads``; block is their size.
    Returns: [n, conv_dim], contiguous; with keys memory as ``conv_heads`` divides it.
    """
    K, conv_dim = weight.shape
    if plan.block < K - 1:
        raise ValueError(f"blocks of {plan.block} tokens: must hold {K - 1}, the taps before one")
    room = cdiv(plan.tokens, 16) * 16
    rows, key_channels, eps = plan.tokens, 0, 0.0
    if keys is not None:
        rows, key_channels, eps = room, keys.groups * keys.size, keys.eps
    out = torch.empty(rows, conv_dim, dtype=channels.dtype, device=channels.device)
    head_block = 32
    raw, dt, dt_bias, (low, high) = steps or StepSizes(None, None, None, (0.0, 0.0))
    heads, dt_stride = (0, 0) if raw is None else (raw.shape[1], raw.stride(0))
    blocks = cdiv(conv_dim, block) + cdiv(heads, head_block)
    _prefill_conv_kernel[(blocks, len(plan.blocks))](
        *(channels, raw, weight, bias, dt_bias, history, out, dt, plan.requests, plan.segments),
        *(plan.blocks, room, channels.stride(0), dt_stride, history.stride(0)),
        *(float(low), float(high), eps),
        H=heads,
        CONV_DIM=conv_dim,
        KEYS=key_channels,
        K=K,
        TOKENS=plan.block,
        BLOCK=block,
        HEAD_BLOCK=head_block,
        num_warps=warps,
    )
    return out


def conv_heads(
    channels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor,
    plan: PrefillPlan,
    keys: Keys,
    warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """``conv_prompts`` of a delta rule -> queries and keys [n, groups, size], values [n, ·], each
    contiguous."""
    given, (groups, size, _) = (channels, weight, bias, history, plan), keys
    out = conv_prompts(*given, block=size, warps=warps, keys=keys)
    (room, conv_dim), each = out.shape, groups * size
    parts = out.view(-1).split([room * each, room * each, room * (conv_dim - 2 * each)])
    q, k, v = (part.view(room, -1)[: plan.tokens] for part in parts)
    return q.unflatten(1, (groups, size)), k.unflatten(1, (groups, size)), v
