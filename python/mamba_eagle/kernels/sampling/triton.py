"""The target's token at every node, on a GPU: launches that never ask the host.

    maxima    the largest logit of every SUB tokens                       one read of the logits
    pivot     per row: the largest of all, and a bound below which no kept token should be
    collect   a filtered row: its tokens above the bound, to a short list  one read of the logits
              any other row: noise, the best token of each block
    choose    per row: exact top-k, top-p and min-p on the short list, noise, the best token
    search    rows whose short list was too long or too short: the same, over the whole row

"Logits" are adjusted where they are read: penalties, bias, ban of stop tokens. A grammar's mask may
be laid over the logits before: what is -inf stays so.

Tokens are selected by integer keys, which are all different: the high part orders like the float,
the low part ranks lower token ids first. The threshold of a filter is the largest key t such that
the weights of all keys from t on reach a limit (top-k: weight 1, limit k; top-p: the mass, limit p
of the total); it is found bit by bit. Weights are integers, so neither the order of addition nor
the order of the short list matters.

The tokens are those of runner/sampler.py on the same device, bit for bit. Hence: products that are
added to something are rounded first (``_product``; no fused multiply-add), quotients are rounded
correctly, and exponentials and noise are computed as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from mamba_eagle.kernels.sampling import tables as tables_module
from mamba_eagle.kernels.sampling.tables import SampledNodes, SamplingTables
from mamba_eagle.kernels.sampling_noise.triton import gumbel_of, row_key, token_bits
from mamba_eagle.kernels.triton_math import INTERPRETED

NOISE, TOP_K, TOP_P, MIN_P, HISTORY, BIAS, BAN = (
    tl.constexpr(getattr(tables_module, name))
    for name in ("NOISE", "TOP_K", "TOP_P", "MIN_P", "HISTORY", "BIAS", "BAN")
)
NO_TOKEN = tl.constexpr(-1)
MASS = tl.constexpr(2.0**40)  # as in runner/sampler.py
LOWEST = tl.constexpr(-(2**31))  # below every rising number
INFINITE = tl.constexpr(0x7F800000)  # the rising number of +infinity; those of NaN are above it
IMPOSSIBLE = tl.constexpr(-0x7F800001)  # of -infinity

# views of larger tensors may begin anywhere, which is no reason for other machine code
ANY_PLACE = ["slots", "positions", "tree_tokens", "ancestors"]

BLOCK = 4096  # tokens per program
SUB = 128  # tokens whose largest logit is kept
LIST = 4096  # tokens of a short list


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _product(a, b):
    """a · b, rounded to float32 before anything is added to it."""
    if INTERPRETED:
        return a * b
    else:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _exp(x):
    """As torch's exp on the same device; ``tl.exp`` is an approximation."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _mass(x, highest, temperature):
    """How much a token counts in top-p, int64."""
    share = _exp(tl.div_rn(x - highest, temperature + tl.zeros_like(x)))
    return (share * MASS).to(tl.int64)


@triton.jit
def _rising(x):
    """int32 in the order of the floats; NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _float_of(rising):
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(rising, token, ID_BITS: tl.constexpr):
    """int64 from 0, by rising number and then by falling token id."""
    last: tl.constexpr = (1 << ID_BITS) - 1
    return ((rising.to(tl.int64) + 0x80000000) << ID_BITS) | (last - token).to(tl.int64)


@triton.jit
def _key_rising(key, ID_BITS: tl.constexpr):
    return ((key >> ID_BITS) - 0x80000000).to(tl.int32)


@triton.jit
def _key_token(key, ID_BITS: tl.constexpr):
    last: tl.constexpr = (1 << ID_BITS) - 1
    return last - (key & last)


@triton.jit
def _token_of(best, ID_BITS: tl.constexpr):
    """The token of the best score's key; NO_TOKEN if that score is not finite."""
    rising = _key_rising(best, ID_BITS)
    finite = (rising < INFINITE) & (rising > IMPOSSIBLE) & (best >= 0)
    return tl.where(finite, _key_token(best, ID_BITS), NO_TOKEN)


@triton.jit
def _threshold(key, weight, limit, BITS: tl.constexpr):
    """The largest t such that the weights of keys >= t reach ``limit``; 0 if all do not."""
    found = tl.zeros([], tl.int64)
    one = tl.full([], 1, tl.int64)
    for step in range(BITS):
        trial = found | (one << (BITS - 1 - step))
        reached = tl.sum(tl.where(key >= trial, weight, 0), 0)
        found = tl.where(reached >= limit, trial, found)
    return found


@triton.jit
def _limit(total, top_p):
    """The mass that top-p keeps of ``total``; at least the best token has some of it."""
    share = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
    return tl.maximum(share, 1)


# ── logits ───────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _adjusted(
    token,  # [n] int32
    logits,
    row_stride,
    row,
    request,
    slot,
    asked,  # flags
    positions,
    tree_tokens,
    ancestors,
    numbers,
    integers,
    prompt_seen,
    output_counts,
    bias,
    stops,
    V,
    T,
):
    """Logits of a row after penalties, bias and ban, float32; -inf beyond the vocabulary."""
    valid = token < V
    x = tl.load(logits + row * row_stride + token, mask=valid, other=float("-inf")).to(tl.float32)
    cell = slot * V + token
    if (asked & HISTORY) != 0:
        count = tl.load(output_counts + cell, mask=valid, other=0)
        for other in range(1, T):  # the root is counted already
            on_path = tl.load(ancestors + row * T + other) != 0
            drafted = tl.load(tree_tokens + request * T + other)
            count += (on_path & (drafted == token)).to(tl.int32)
        seen = tl.load(prompt_seen + cell, mask=valid, other=0) != 0
        repetition = tl.load(numbers + slot * 6 + 3) + tl.zeros_like(x)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), _product(x, repetition))
        x = tl.where(seen | (count > 0), repeated, x)
        x = x - _product(count.to(tl.float32), tl.load(numbers + slot * 6 + 4))
        x = x - tl.where(count > 0, tl.load(numbers + slot * 6 + 5), 0.0)
    if (asked & BIAS) != 0:
        x = x + tl.load(bias + cell, mask=valid, other=0.0)
    if (asked & BAN) != 0:
        early = tl.load(positions + row) < tl.load(integers + slot * 3 + 2)
        stop = tl.load(stops + cell, mask=valid, other=0) != 0
        x = tl.where(early & stop, float("-inf"), x)
    return x


@triton.jit
def _noisy_key(x, kept, token, noise_key, temperature, ID_BITS: tl.constexpr):
    """Keys of ``x + temperature · noise``; -1 where not ``kept``."""
    noise = gumbel_of(token_bits(noise_key, token))
    score = x + _product(noise, temperature)
    return tl.where(kept, _key(_rising(score), token, ID_BITS), -1)


@triton.jit
def _above_floor(x, highest, slot, asked, spans):
    """Which tokens min-p keeps."""
    floor = highest + tl.load(spans + slot)
    return (x >= floor) | ((asked & MIN_P) == 0)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _maxima_kernel(
    maxima,  # [rows, SUBS] int32, out: rising numbers
    flags,
    logits,
    row_stride,
    slots,
    positions,
    tree_tokens,
    ancestors,
    numbers,
    integers,
    prompt_seen,
    output_counts,
    bias,
    stops,
    V,
    T,
    SUBS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = row // T
    slot = tl.load(slots + request)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = _adjusted(
        token, logits, row_stride, row, request, slot, tl.load(flags + slot), positions,
        tree_tokens, ancestors, numbers, integers, prompt_seen, output_counts, bias, stops,
        V, T,
    )  # fmt: skip
    rising = tl.where(token < V, _rising(x), LOWEST)
    largest = tl.max(tl.reshape(rising, (BLOCK // SUB, SUB)), 1)
    tl.store(maxima + row * SUBS + block * (BLOCK // SUB) + tl.arange(0, BLOCK // SUB), largest)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots"])
def _pivot_kernel(
    maxima,  # [rows, SUBS] int32
    highest,  # [rows] int32, out: the largest
    pivots,  # [rows] int32, out: tokens below it are left out of the short list
    listed,  # [rows] int32, out: 0
    flags,
    integers,
    slots,
    subs,  # of the SUBS maxima, those that exist
    T,
    SUBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row // T)
    asked = tl.load(flags + slot)
    place = tl.arange(0, SUBS)
    largest = tl.load(maxima + row * SUBS + place, mask=place < subs, other=LOWEST)
    tl.store(highest + row, tl.max(largest, 0))
    tl.store(listed + row, 0)
    if (asked & (TOP_K | TOP_P)) != 0:
        # Each of these maxima is a token: at least ``rank`` tokens are not below the rank-th of
        # them. Without a top-k the rank is a guess, which the kernels that follow check.
        rank = tl.maximum(subs * 3 // 4, 1).to(tl.int64)
        if (asked & TOP_K) != 0:
            rank = tl.minimum(tl.load(integers + slot * 3 + 1), subs)
        key = tl.where(place < subs, largest.to(tl.int64) + 0x80000000, -1)
        ones = tl.full([SUBS], 1, tl.int64)
        tl.store(pivots + row, (_threshold(key, ones, rank, 32) - 0x80000000).to(tl.int32))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _collect_kernel(
    highest,  # [rows] int32
    pivots,  # [rows] int32
    listed,  # [rows] int32, changed: tokens on the short list, which may be more than it holds
    short,  # [rows, LIST] int64, out: their keys
    masses,  # [rows, blocks] int64, out: of all tokens, for a top-p without top-k
    winners,  # [rows, blocks] int64, out: keys of the best scores, without top-k and top-p
    spans,
    flags,
    logits,
    row_stride,
    slots,
    positions,
    tree_tokens,
    ancestors,
    numbers,
    integers,
    prompt_seen,
    output_counts,
    bias,
    stops,
    V,
    T,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = row // T
    slot = tl.load(slots + request)
    asked = tl.load(flags + slot)
    if (asked & NOISE) != 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        valid = token < V
        x = _adjusted(
            token, logits, row_stride, row, request, slot, asked, positions,
            tree_tokens, ancestors, numbers, integers, prompt_seen, output_counts, bias,
            stops, V, T,
        )  # fmt: skip
        best = _float_of(tl.load(highest + row))
        temperature = tl.load(numbers + slot * 6)
        at = row * tl.num_programs(0) + block
        if (asked & (TOP_K | TOP_P)) == 0:
            noise_key = row_key(tl.load(integers + slot * 3), tl.load(positions + row))
            kept = valid & _above_floor(x, best, slot, asked, spans)
            key = _noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
            tl.store(winners + at, tl.max(key, 0))
        else:
            rising = _rising(x)
            chosen = valid & (rising >= tl.load(pivots + row))
            count = chosen.to(tl.int32)
            first = tl.atomic_add(listed + row, tl.sum(count, 0))
            place = first + tl.cumsum(count, 0) - 1
            key = _key(rising, token, ID_BITS)
            tl.store(short + row * LIST + place, key, mask=chosen & (place < LIST))
            if (asked & TOP_K) == 0:
                mass = tl.where(valid, _mass(x, best, temperature), 0)
                tl.store(masses + at, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _choose_kernel(
    sampled,  # [rows] int64, out
    unsettled,  # [rows] int32, out: 1 where the short list does not decide
    highest,
    maxima,
    listed,
    short,
    masses,
    winners,
    spans,
    flags,
    logits,
    row_stride,
    slots,
    positions,
    tree_tokens,
    ancestors,
    numbers,
    integers,
    prompt_seen,
    output_counts,
    bias,
    stops,
    V,
    T,
    blocks,
    ID_BITS: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCKS: tl.constexpr,  # padded
    LIST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // T
    slot = tl.load(slots + request)
    asked = tl.load(flags + slot)
    top = tl.load(highest + row)
    token_found = tl.full([], NO_TOKEN, tl.int64)
    left = tl.zeros([], tl.int32)
    if (top < INFINITE) & (top > IMPOSSIBLE):
        block = tl.arange(0, BLOCKS)
        if (asked & NOISE) == 0:
            place = tl.arange(0, SUBS)
            subs = (V + SUB - 1) // SUB
            largest = tl.load(maxima + row * SUBS + place, mask=place < subs, other=LOWEST)
            first = tl.min(tl.where(largest == top, place, SUBS), 0)
            token = first * SUB + tl.arange(0, SUB)
            x = _adjusted(
                token, logits, row_stride, row, request, slot, asked, positions,
                tree_tokens, ancestors, numbers, integers, prompt_seen, output_counts,
                bias, stops, V, T,
            )  # fmt: skip
            is_best = (_rising(x) == top) & (token < V)
            token_found = tl.min(tl.where(is_best, token, 0x7FFFFFFF), 0).to(tl.int64)
        elif (asked & (TOP_K | TOP_P)) == 0:
            best = tl.load(winners + row * blocks + block, mask=block < blocks, other=-1)
            token_found = _token_of(tl.max(best, 0), ID_BITS)
        else:
            count = tl.load(listed + row)
            settled = count <= LIST
            place = tl.arange(0, LIST)
            key = tl.load(short + row * LIST + place, mask=place < count, other=-1)
            temperature, high = tl.load(numbers + slot * 6), _float_of(top)
            x = _float_of(_key_rising(key, ID_BITS))
            lowest = tl.zeros([], tl.int64)
            if (asked & TOP_K) != 0:
                top_k = tl.load(integers + slot * 3 + 1)
                settled = settled & (count >= top_k)
                ones = tl.full([LIST], 1, tl.int64)
                lowest = _threshold(key, ones, top_k, 32 + ID_BITS)
            if (asked & TOP_P) != 0:
                mass = tl.where(key >= lowest, _mass(x, high, temperature), 0)
                covered = tl.sum(mass, 0)
                total = covered
                if (asked & TOP_K) == 0:
                    parts = tl.load(masses + row * blocks + block, mask=block < blocks, other=0)
                    total = tl.sum(parts, 0)
                limit = _limit(total, tl.load(numbers + slot * 6 + 1))
                settled = settled & (covered >= limit)
                lowest = tl.maximum(lowest, _threshold(key, mass, limit, 32 + ID_BITS))
            if settled:
                kept = (key >= lowest) & _above_floor(x, high, slot, asked, spans)
                noise_key = row_key(tl.load(integers + slot * 3), tl.load(positions + row))
                token = _key_token(key, ID_BITS).to(tl.int32)
                scored = _noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
                token_found = _token_of(tl.max(scored, 0), ID_BITS)
            else:
                left = tl.full([], 1, tl.int32)
    tl.store(sampled + row, token_found)
    tl.store(unsettled + row, left)


@triton.jit
def _row_weight(
    least,
    high,
    temperature,
    logits,
    row_stride,
    row,
    request,
    slot,
    asked,
    positions,
    tree_tokens,
    ancestors,
    numbers,
    integers,
    prompt_seen,
    output_counts,
    bias,
    stops,
    V,
    T,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """How many tokens have keys >= ``least``, or their mass: over the whole row, int64."""
    reached = tl.zeros([], tl.int64)
    for begin in range(0, V, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = _adjusted(
            token, logits, row_stride, row, request, slot, asked, positions, tree_tokens,
            ancestors, numbers, integers, prompt_seen, output_counts, bias, stops, V, T,

        )  # fmt: skip
        chosen = (token < V) & (_key(_rising(x), token, ID_BITS) >= least)
        if BY_MASS:
            reached += tl.sum(tl.where(chosen, _mass(x, high, temperature), 0), 0)
        else:
            reached += tl.sum(chosen.to(tl.int64), 0)
    return reached


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _search_kernel(
    sampled,  # [rows] int64, changed where unsettled
    unsettled,
    highest,
    spans,
    flags,
    logits,
    row_stride,
    slots,
    positions,
    tree_tokens,
    ancestors,
    numbers,
    integers,
    prompt_seen,
    output_counts,
    bias,
    stops,
    V,
    T,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(unsettled + row) != 0:
        BITS: tl.constexpr = 32 + ID_BITS
        request = row // T
        slot = tl.load(slots + request)
        asked = tl.load(flags + slot)
        temperature, high = tl.load(numbers + slot * 6), _float_of(tl.load(highest + row))
        one = tl.full([], 1, tl.int64)
        kth = tl.zeros([], tl.int64)
        if (asked & TOP_K) != 0:
            limit = tl.load(integers + slot * 3 + 1)
            for step in range(BITS):
                trial = kth | (one << (BITS - 1 - step))
                reached = _row_weight(
                    trial, high, temperature, logits, row_stride, row, request, slot, asked,
                    positions, tree_tokens, ancestors, numbers, integers, prompt_seen,
                    output_counts, bias, stops, V, T, ID_BITS, BLOCK, False,
                )  # fmt: skip
                kth = tl.where(reached >= limit, trial, kth)
        lowest = kth
        if (asked & TOP_P) != 0:
            limit = tl.zeros([], tl.int64)
            lowest = tl.zeros([], tl.int64)
            for step in range(BITS + 1):  # first the total
                bit = one << tl.minimum(BITS - step, BITS - 1)
                trial = tl.where(step == 0, kth, lowest | bit)
                reached = _row_weight(
                    tl.maximum(trial, kth), high, temperature, logits, row_stride, row, request,
                    slot, asked, positions, tree_tokens, ancestors, numbers, integers,
                    prompt_seen, output_counts, bias, stops, V, T, ID_BITS, BLOCK,
                    True,
                )  # fmt: skip
                if step == 0:
                    limit = _limit(reached, tl.load(numbers + slot * 6 + 1))
                else:
                    lowest = tl.where(reached >= limit, trial, lowest)
            lowest = tl.maximum(lowest, kth)
        noise_key = row_key(tl.load(integers + slot * 3), tl.load(positions + row))
        best = tl.full([], -1, tl.int64)
        for begin in range(0, V, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            x = _adjusted(
                token, logits, row_stride, row, request, slot, asked, positions, tree_tokens,
                ancestors, numbers, integers, prompt_seen, output_counts, bias, stops, V,
                T,
            )  # fmt: skip
            kept = (token < V) & (_key(_rising(x), token, ID_BITS) >= lowest)
            kept = kept & _above_floor(x, high, slot, asked, spans)
            scored = _noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
            best = tl.maximum(best, tl.max(scored, 0))
        tl.store(sampled + row, _token_of(best, ID_BITS))


# ── launches ─────────────────────────────────────────────────────────────────────────────────


def sample_nodes(
    logits: Tensor,
    nodes: SampledNodes,
    tables: SamplingTables,
    block: int = BLOCK,
    sub: int = SUB,
    short_list: int = LIST,
    tile: int = BLOCK,
) -> Tensor:
    """The target's token at every node: [b, T] int64, NO_TOKEN where none can be sampled.

    Args:
        logits: [b, T, V], any float dtype, rows contiguous.
        block, sub, short_list, tile: powers of two, ``sub`` at most ``block``; tile: of a row that
            is searched.
    """
    b, T, V = logits.shape
    rows, device = b * T, logits.device
    logits = logits.reshape(rows, V)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = triton.cdiv(V, block)
    subs = triton.next_power_of_2(blocks) * (block // sub)
    ids = max((V - 1).bit_length(), 1)

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    maxima, sampled = integers(rows, subs), integers(rows, dtype=torch.int64)
    highest, pivots, listed, unsettled = (integers(rows) for _ in range(4))
    short = integers(rows, short_list, dtype=torch.int64)
    masses, winners = (integers(rows, blocks, dtype=torch.int64) for _ in range(2))
    seen, counts, bias, stops = tables[4:]
    reads = (
        tables.flags,
        logits,
        logits.stride(0),
        nodes.slots,
        nodes.positions.contiguous(),
        nodes.tokens.contiguous(),
        nodes.ancestors.contiguous().view(torch.uint8),
        tables.numbers,
        tables.integers,
        seen.view(torch.uint8),
        counts,
        bias,
        stops.view(torch.uint8),
        V,
        T,
    )
    per_block, per_row = (blocks, rows), (rows,)
    _maxima_kernel[per_block](
        maxima, *reads, SUBS=subs, BLOCK=block, SUB=sub, num_warps=_warps(block)
    )
    _pivot_kernel[per_row](
        maxima,
        highest,
        pivots,
        listed,
        tables.flags,
        tables.integers,
        nodes.slots,
        triton.cdiv(V, sub),
        T,
        SUBS=subs,
    )
    _collect_kernel[per_block](
        highest,
        pivots,
        listed,
        short,
        masses,
        winners,
        tables.spans,
        *reads,
        ID_BITS=ids,
        BLOCK=block,
        LIST=short_list,
        num_warps=_warps(block),
    )
    _choose_kernel[per_row](
        sampled,
        unsettled,
        highest,
        maxima,
        listed,
        short,
        masses,
        winners,
        tables.spans,
        *reads,
        blocks,
        ID_BITS=ids,
        SUBS=subs,
        SUB=sub,
        BLOCKS=triton.next_power_of_2(blocks),
        LIST=short_list,
        num_warps=_warps(short_list),
    )
    _search_kernel[per_row](
        sampled,
        unsettled,
        highest,
        tables.spans,
        *reads,
        ID_BITS=ids,
        BLOCK=tile,
        num_warps=_warps(tile),
    )
    return sampled.view(b, T)


def _warps(elements: int) -> int:
    """Eight for a whole block, so that a thread has 16 elements."""
    return max(1, min(8, elements // 512))
