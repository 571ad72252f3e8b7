"""The sum of the ranks' parts in one kernel, with or without the residual stream and its norm.

Each rank has room for two calls' parts of all ranks, which all of them can write, and a clock: how
many calls there were. In call c, program p of each rank

1. writes its tokens' parts to place c mod 2 of every other rank's room,
2. then sets its flag there, one per sender and program, to c + 1 (release, at system scope),
3. waits until the flags that the other ranks' programs p set here are c + 1 (acquire),
4. adds up the parts in the order of the ranks, which gives all of them the same bits.

Two places are enough. A rank writes to a place in call c + 2 after all its programs have seen the
others' flags of call c + 1. The others set these in kernels that began after their call c had
ended, with which they had read that place. The last program to read the clock sets it forward; it
lies on the device, so a captured call may be repeated. All programs of a launch must run at the
same time, so there are no more than processors.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.triton import warps_of_row
from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done


class Peers(NamedTuple):
    """What a rank needs to know of all ranks."""

    parts: Tensor  # [ranks] int64: address of each one's room, [2, ranks, tokens, size]
    flags: Tensor  # [ranks] int64: address of each one's flags, [ranks, programs] int64, first 0
    clock: Tensor  # [2] int64: calls so far, programs that have read that; first 0
    rank: int
    ranks: int
    tokens: int  # most of a call
    programs: int  # most of a launch; must all fit on the device at once


@triton.jit(do_not_specialize=["n"])  # one kernel, whatever steps there are
def _pushed_sum_kernel(
    own,  # [n, SIZE]
    stream,  # [n, SIZE], changed; None: there is no norm
    weight,  # [SIZE], of the norm
    out,  # [n, SIZE]: the sum, or the norm
    parts,  # [RANKS] int64, as in Peers
    flags,  # [RANKS] int64, as in Peers
    clock,  # [2] int64
    n,
    eps,
    TOKENS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    room_type = tl.pointer_type(own.dtype.element_ty)
    flag_type = tl.pointer_type(tl.int64)
    call = tl.load(clock)
    place = (call % 2) * RANKS

    for token in range(program, n, programs):
        part = tl.load(own + token * SIZE + column, mask=inside)
        at = ((place + RANK) * TOKENS + token) * SIZE
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                room = tl.multiple_of(tl.load(parts + rank).to(room_type), 16)
                tl.store(room + at + column, part, mask=inside)

    tl.debug_barrier()  # all threads have written, and read the clock
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = tl.load(flags + rank).to(flag_type) + RANK * PROGRAMS + program
            tl.atomic_xchg(flag, call + 1, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = tl.load(flags + RANK).to(flag_type) + rank * PROGRAMS + program
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") <= call:
                pass
    tl.debug_barrier()  # no thread reads before

    own_room = tl.multiple_of(tl.load(parts + RANK).to(room_type), 16)
    for token in range(program, n, programs):
        whole = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                part = tl.load(own + token * SIZE + column, mask=inside, other=0.0)
            else:
                at = ((place + rank) * TOKENS + token) * SIZE
                # not from a cache of this processor, which may be older
                part = tl.load(own_room + at + column, mask=inside, other=0.0, cache_modifier=".cg")
            whole += part.to(tl.float32)
        rounded = whole.to(own.dtype.element_ty)
        if stream is not None:
            before = tl.load(stream + token * SIZE + column, mask=inside, other=0.0)
            numbers = before.to(tl.float32) + rounded.to(tl.float32)
            tl.store(stream + token * SIZE + column, numbers, mask=inside)
            w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers) / SIZE + eps)
            tl.store(out + token * SIZE + column, numbers * scale * w, mask=inside)
        else:
            tl.store(out + token * SIZE + column, rounded, mask=inside)

    if tl.atomic_add(clock + 1, 1) == programs - 1:
        tl.store(clock + 1, 0)
        tl.store(clock, call + 1)


def pushed_sum(x: Tensor, peers: Peers) -> Tensor:
    """x [n, size], contiguous, n up to ``peers.tokens`` -> the sum over ranks [n, size]."""
    return _launch(x, None, None, 0.0, peers)


def pushed_sum_norm(
    stream: Tensor, added: Tensor, weight: Tensor, eps: float, peers: Peers
) -> Tensor:
    """The norm of ``stream`` + the sum over ranks of ``added``; stream is set to that sum.

    stream, added [n, size], weight [size], contiguous, of the same dtype.
    """
    return _launch(added, stream, weight, eps, peers)


def _launch(
    own: Tensor, stream: Tensor | None, weight: Tensor | None, eps: float, peers: Peers
) -> Tensor:
    out, (n, size) = torch.empty_like(own), own.shape
    block = next_power_of_2(size)
    _pushed_sum_kernel[(min(n, peers.programs),)](
        *(own, stream, weight, out, peers.parts, peers.flags, peers.clock, n, eps),
        TOKENS=peers.tokens,
        PROGRAMS=peers.programs,
        RANK=peers.rank,
        RANKS=peers.ranks,
        SIZE=size,
        BLOCK=block,
        num_warps=warps_of_row(block),
        **overlapping(own.device),
    )
    return out
