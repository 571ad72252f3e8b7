"""Gated experts of prompts in float8 with scales of blocks, with the bits of triton.py's tiles.

A program has one tile of an expert's pairs. As in float8/triton_prompts.py they are the left
factor, so that a thread needs the scales of two of them, and the copy engine brings the weights.
Outputs of the first product stand in the order of experts. Its programs have the rows of a group of
the second one's inputs, so they round what they make.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mamba_eagle.kernels.experts.triton import BLOCK, GROUPED, Config, Stack
from mamba_eagle.kernels.experts.triton_routes import Sorted
from mamba_eagle.kernels.float8.torch import Operand, Rounded
from mamba_eagle.kernels.float8.triton import (
    empty_rounded,
    product_of_tiles,
    rounded,
    to_e4m3,
    token_scale,
)
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import previous_done, silu

SIZES = (513, 4097)  # numbers of tokens from which these kernels, and larger tiles, are faster


@Staged
@triton.jit(do_not_specialize=["x_group_stride", "y_group_stride"])
def _prompt_kernel(
    x,  # float8: [n, SIZE] if GATED, else [pairs, SIZE], those of an expert side by side
    x_scale,  # of each row and group
    weight,  # [E · rows, SIZE] float8, in tiles [BLOCK, BLOCK]; rows: 2 OUT if GATED, else OUT
    scale,  # [E, rows / BLOCK, SIZE / BLOCK]
    order,  # [pairs] int32, those of an expert side by side
    ends,  # [E] int32, where each expert's pairs end there
    y,  # [pairs, OUT]: float8 in that order if GATED, else by number
    y_scale,  # written if GATED
    x_group_stride,
    y_group_stride,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two, at least EXPERTS
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Raw products if not GATED; else ``silu(gate) · up``, rounded in groups of BLOCK."""
    STEPS: tl.constexpr = SIZE // BLOCK
    ROWS: tl.constexpr = OUT * 2 if GATED else OUT
    block, tile, each = tl.program_id(0), tl.program_id(1), tl.arange(0, PADDED)
    previous_done(OVERLAP)
    end = tl.load(ends + each, mask=each < EXPERTS, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    tiles = tl.where(each < EXPERTS, tl.cdiv(end - begin, TOKENS), 0)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (each < EXPERTS)).to(tl.int32), 0)
    if expert == EXPERTS:
        return
    own = tile - tl.sum(tl.where(each < expert, tiles, 0), 0)
    place = tl.load(ends + expert - 1, mask=expert > 0, other=0) + own * TOKENS
    place += tl.arange(0, TOKENS)
    last = tl.load(ends + expert) - 1
    is_pair = place <= last
    place = tl.minimum(place, last)
    pair = tl.load(order + place)
    given = pair // TOP_K if GATED else place
    rows = x + given.to(tl.int64)[:, None] * SIZE + tl.arange(0, BLOCK)[None, :]
    groups = x_scale + given
    first = expert * ROWS + block * BLOCK
    scales = scale + first // BLOCK * STEPS
    above = scales + OUT // BLOCK * STEPS
    sums = tl.zeros([TOKENS, BLOCK], tl.float32)
    ups = tl.zeros([TOKENS, BLOCK], tl.float32)
    s, group, up_s = tl.load(scales), tl.load(groups), 0.0
    if GATED:
        up_s = tl.load(above)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        t = tl.load(rows + step * BLOCK)
        w = weight.load([first, step * BLOCK])
        if GATED:
            u = weight.load([first + OUT, step * BLOCK])
        later = tl.minimum(step + 1, STEPS - 1)  # whose scales are loaded while sums are made
        next_s, next_group = tl.load(scales + later), tl.load(groups + later * x_group_stride)
        part = product_of_tiles(t, w, tl.zeros([TOKENS, BLOCK], tl.float32))
        sums += part * (s * group)[:, None]
        if GATED:
            next_up_s = tl.load(above + later)
            part = product_of_tiles(t, u, tl.zeros([TOKENS, BLOCK], tl.float32))
            ups += part * (up_s * group)[:, None]
            up_s = next_up_s
        s, group = next_s, next_group
    to = place if GATED else pair
    out = y + to.to(tl.int64)[:, None] * OUT + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    if GATED:
        made = (silu(sums) * ups).to(tl.bfloat16).to(tl.float32)  # as if written in between
        size = token_scale(made, 1)
        tl.store(y_scale + block * y_group_stride + to, size, mask=is_pair)
        tl.store(out, to_e4m3(made / size[:, None]), mask=is_pair[:, None])
    else:
        tl.store(out, sums, mask=is_pair[:, None])


def fits(up: Stack, down: Stack) -> bool:
    """Whether the matrices of gated experts are cut into whole blocks."""
    stacks = (up, down)
    blocks = all(each.block == BLOCK and each.inputs == GROUPED for each in stacks)
    return blocks and not any(size % BLOCK for each in stacks for size in each.weight.shape[1:])


def gated_experts(x: Operand, up: Stack, down: Stack, place: Sorted) -> Tensor:
    """x [n, size] bfloat16, or rounded -> what the experts of all pairs make, [pairs, size], by
    number."""
    assert up.rounding is not None and down.rounding is not None
    pairs, (_, size, width), given = len(place.order), down.weight.shape, rounded(x, up.rounding)
    n, device = len(given.values), down.weight.device
    top_k = pairs // n
    made = empty_rounded(pairs, width, down.rounding, device)
    wide = n >= SIZES[1]
    config = Config(BLOCK, 128, BLOCK, 8, 3) if wide else Config(BLOCK, 64, BLOCK, 4, 4)
    _launch(given, up, place, top_k, made, config)
    y = torch.empty(pairs, size, dtype=torch.bfloat16, device=device)
    _launch(made, down, place, top_k, y, Config(BLOCK, 64, BLOCK, 4, 3))
    return y


def _launch(
    x: Rounded, stack: Stack, place: Sorted, top_k: int, y: Tensor | Rounded, config: Config
) -> None:
    (count, _, size), gated = stack.weight.shape, isinstance(y, Rounded)
    out, own = (y.values, y) if gated else (y, x)
    pairs, width = out.shape
    _prompt_kernel[(width // BLOCK, cdiv(pairs, config.tokens) + count)](
        *(x.values, x.scale),
        TensorDescriptor.from_tensor(stack.weight.view(-1, size), [BLOCK, BLOCK]),
        *(stack.scale, place.order, place.ends, out, own.scale),
        *(x.scale.stride(1), own.scale.stride(1)),
        SIZE=size,
        OUT=width,
        TOP_K=top_k,
        EXPERTS=count,
        PADDED=next_power_of_2(count),
        GATED=gated,
        BLOCK=BLOCK,
        TOKENS=config.tokens,
        STAGES=config.stages,
        num_warps=config.warps,
        **overlapping(out.device),
    )
