"""The target's token at every node, on a GPU: launches that never ask the host.

    maxima    the largest logit of every SUB tokens                       one read of the logits
    pivot     per row: the largest of all, and a bound below which no kept token should be
    collect   a filtered row: its tokens above the bound, to a short list  one read of the logits
              any other row: noise, the best token of each block
    choose    per row: exact top-k, top-p and min-p on the short list, noise, the best token
    nominate, weigh, search    rows whose short list was too long or too short (triton_search.py)

A list of FEW tokens, as a top-k leaves, is ranked by comparing all pairs; of a longer one the
thresholds are found bit by bit. Neither depends on the order of the list. What the kernels share is
in triton_rows.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2
from mamba_eagle.kernels.sampling.tables import SampledNodes, SamplingTables
from mamba_eagle.kernels.sampling.triton_rows import (
    ANY_PLACE,
    IMPOSSIBLE,
    INFINITE,
    LOWEST,
    MOST,
    NO_TOKEN,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Reads,
    above_floor,
    adjusted,
    asks,
    float_of,
    integer_of,
    key_of,
    key_rising,
    key_token,
    lists,
    mass_limit,
    mass_of,
    noise_key_of,
    noisy_key,
    number_of,
    rising_of,
    row_of,
    threshold,
    token_of,
)
from mamba_eagle.kernels.sampling.triton_search import nominate_kernel, search_kernel, weigh_kernel

BLOCK = 4096  # tokens per program
SUB = 128  # tokens whose largest logit is kept
LIST = 4096  # tokens of a short list
FEW = 256  # tokens of a short list whose pairs are compared
TILE = tl.constexpr(32)  # of these, how many with all others at once
EACH = 4  # nominees of each block
NOMINEES = 16  # of a row
ROWS_AT_ONCE = 16  # whose blocks are searched side by side


# ── kernels ──────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _maxima_kernel(
    maxima,  # [rows, SUBS] int32, out: rising numbers
    tables,
    slots,
    positions,
    tree_tokens,
    ancestors,
    T,
    SUBS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    reads = Reads(*tables, slots, positions, tree_tokens, ancestors, T)
    block, row = tl.program_id(0), row_of(tl.program_id(1).to(tl.int64), reads)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = adjusted(token, row, reads)
    rising = tl.where(token < reads.V, rising_of(x), LOWEST)
    largest = tl.max(tl.reshape(rising, (BLOCK // SUB, SUB)), 1)
    at = maxima + row.number * SUBS + block * (BLOCK // SUB)
    tl.store(at + tl.arange(0, BLOCK // SUB), largest)


@triton.jit
def _ranked(rising, rank):
    """The rank-th largest of rising numbers, int32."""
    unsigned = rising.to(tl.uint32, bitcast=True) ^ 0x80000000
    found = tl.zeros([], tl.int64)
    one = tl.full([], 1, tl.int64)
    for step in range(32):
        trial = found | (one << (31 - step))
        reached = tl.sum((unsigned >= trial.to(tl.uint32)).to(tl.int32), 0)
        found = tl.where(reached >= rank, trial, found)
    return (found - 0x80000000).to(tl.int32)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots"])
def _pivot_kernel(
    maxima,  # [rows, SUBS] int32
    highest,  # [rows] int32, out: the largest
    pivots,  # [rows] int32, out: tokens below it are left out of the short list
    listed,  # [rows] int32, out: 0
    queued,  # [1] int32, out: 0
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
    if row == 0:
        tl.store(queued, 0)
    if lists(asked):
        # Each of these maxima is a token: at least ``rank`` tokens are not below the rank-th of
        # them. Without a top-k the rank is a guess, which the kernels that follow check; so it is
        # for a large one, where some subs hold several of its tokens: a fifth more than it needs.
        rank = tl.maximum(subs * 3 // 4, 1).to(tl.int64)
        if asks(asked, TOP_K):
            rank = tl.minimum(integer_of(integers, slot, MOST), subs)
            if rank > subs // 2:
                hit = 1.0 - tl.exp(-1.2 * integer_of(integers, slot, MOST).to(tl.float32) / subs)
                rank = tl.maximum((hit * subs).to(tl.int64), 1)
        tl.store(pivots + row, _ranked(largest, rank))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _collect_kernel(
    highest,  # [rows] int32
    pivots,  # [rows] int32
    listed,  # [rows] int32, changed: tokens on the short list, which may be more than it holds
    short,  # [rows, LIST] int64, out: their keys
    masses,  # [rows, blocks] int64, out: of all tokens, for a top-p without top-k
    winners,  # [rows, blocks] int64, out: keys of the best scores, without top-k and top-p
    tables,
    slots,
    positions,
    tree_tokens,
    ancestors,
    T,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    reads = Reads(*tables, slots, positions, tree_tokens, ancestors, T)
    block, row = tl.program_id(0), row_of(tl.program_id(1).to(tl.int64), reads)
    if asks(row.asked, TEMPERATURE):
        token = block * BLOCK + tl.arange(0, BLOCK)
        valid = token < reads.V
        x = adjusted(token, row, reads)
        best = float_of(tl.load(highest + row.number))
        temperature = number_of(reads.numbers, row.slot, TEMPERATURE)
        at = row.number * tl.num_programs(0) + block
        if not lists(row.asked):
            noise_key = noise_key_of(row, reads)
            kept = valid & above_floor(x, best, row, reads)
            key = noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
            tl.store(winners + at, tl.max(key, 0))
        else:
            rising = rising_of(x)
            chosen = valid & (rising >= tl.load(pivots + row.number))
            count = chosen.to(tl.int32)
            first = tl.atomic_add(listed + row.number, tl.sum(count, 0))
            place = first + tl.cumsum(count, 0) - 1
            key = key_of(rising, token, ID_BITS)
            tl.store(short + row.number * LIST + place, key, mask=chosen & (place < LIST))
            if not asks(row.asked, TOP_K):
                mass = tl.where(valid, mass_of(x, best, temperature), 0)
                tl.store(masses + at, tl.sum(mass, 0))


@triton.jit
def _least_of_few(key, own, shares, count, limit, BY_MASS: tl.constexpr):
    """As ``threshold``, from comparing each key with all of the list: the largest key such that
    those from it on reach ``limit``. own: the list, ``count`` keys, of which ``key`` is the start;
    shares: their masses."""
    reached = tl.zeros_like(key)
    for begin in range(0, count, TILE):
        place = begin + tl.arange(0, TILE)
        other = tl.load(own + place, mask=place < count, other=-1)
        weight = (other >= 0).to(tl.int64)
        if BY_MASS:
            weight = tl.load(shares + place, mask=place < count, other=0)
        # a thread has a key, and sums over the others by itself
        reached += tl.sum(tl.where(other[:, None] >= key[None, :], weight[:, None], 0), 0)
    return tl.max(tl.where((reached >= limit) & (key >= 0), key, 0), 0)


@triton.jit
def _listed_token(
    own,  # the short list: ``count`` keys
    shares,  # [PLACES] int64, their masses: scratch, if all pairs are compared
    count,
    top,
    row,
    reads,
    blocks,
    masses,
    ID_BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The best of the tokens that the filters keep, and whether the list decides that."""
    BITS: tl.constexpr = 32 + ID_BITS
    place = tl.arange(0, PLACES)
    key = tl.load(own + place, mask=place < count, other=-1)
    temperature, high = number_of(reads.numbers, row.slot, TEMPERATURE), float_of(top)
    x = float_of(key_rising(key, ID_BITS))
    decides = count <= PLACES
    lowest = tl.zeros([], tl.int64)
    if asks(row.asked, TOP_K):
        top_k = integer_of(reads.integers, row.slot, MOST)
        decides = decides & (count >= top_k)
        if PAIRS:
            lowest = _least_of_few(key, own, shares, count, top_k, False)
        else:
            lowest = threshold(key, tl.full([PLACES], 1, tl.int64), top_k, BITS)
    if asks(row.asked, TOP_P):
        mass = tl.where(key >= lowest, mass_of(x, high, temperature), 0)
        covered = tl.sum(mass, 0)
        total = covered
        if not asks(row.asked, TOP_K):
            block = tl.arange(0, BLOCKS)
            parts = tl.load(masses + row.number * blocks + block, mask=block < blocks, other=0)
            total = tl.sum(parts, 0)
        limit = mass_limit(total, number_of(reads.numbers, row.slot, TOP_P))
        decides = decides & (covered >= limit)
        if PAIRS:
            tl.store(shares + place, mass)
            tl.debug_barrier()  # other threads read it
            least = _least_of_few(key, own, shares, count, limit, True)
        else:
            least = threshold(key, mass, limit, BITS)
        lowest = tl.maximum(lowest, least)
    kept = (key >= lowest) & above_floor(x, high, row, reads)
    noise_key = noise_key_of(row, reads)
    token = key_token(key, ID_BITS).to(tl.int32)
    scored = noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
    return token_of(tl.max(scored, 0), ID_BITS), decides


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def _choose_kernel(
    sampled,  # [rows] int64, out
    queue,  # [rows] int32, out: rows that the short list does not decide, in any order
    queued,  # [1] int32, changed: how many
    highest,
    maxima,
    listed,
    short,
    shares,  # [rows, FEW] int64: scratch
    masses,
    winners,
    tables,
    slots,
    positions,
    tree_tokens,
    ancestors,
    T,
    blocks,
    ID_BITS: tl.constexpr,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCKS: tl.constexpr,  # padded
    LIST: tl.constexpr,
    FEW: tl.constexpr,
):
    reads = Reads(*tables, slots, positions, tree_tokens, ancestors, T)
    row = row_of(tl.program_id(0).to(tl.int64), reads)
    top = tl.load(highest + row.number)
    token_found = tl.full([], NO_TOKEN, tl.int64)
    if (top < INFINITE) & (top > IMPOSSIBLE):
        if not asks(row.asked, TEMPERATURE):
            place = tl.arange(0, SUBS)
            subs = (reads.V + SUB - 1) // SUB
            largest = tl.load(maxima + row.number * SUBS + place, mask=place < subs, other=LOWEST)
            first = tl.min(tl.where(largest == top, place, SUBS), 0)
            token = first * SUB + tl.arange(0, SUB)
            x = adjusted(token, row, reads)
            is_best = (rising_of(x) == top) & (token < reads.V)
            token_found = tl.min(tl.where(is_best, token, 0x7FFFFFFF), 0).to(tl.int64)
        elif not lists(row.asked):
            block = tl.arange(0, BLOCKS)
            best = tl.load(winners + row.number * blocks + block, mask=block < blocks, other=-1)
            token_found = token_of(tl.max(best, 0), ID_BITS)
        else:
            count = tl.load(listed + row.number)
            own = short + row.number * LIST
            if count <= FEW:
                token_found, decides = _listed_token(
                    own, shares + row.number * FEW, count, top, row, reads, blocks, masses,
                    ID_BITS, BLOCKS, FEW, True,
                )  # fmt: skip
            else:
                token_found, decides = _listed_token(
                    own, shares + row.number * FEW, count, top, row, reads, blocks, masses,
                    ID_BITS, BLOCKS, LIST, False,
                )  # fmt: skip
            if not decides:
                tl.store(queue + tl.atomic_add(queued, 1), row.number.to(tl.int32))
    tl.store(sampled + row.number, token_found)


# ── launches ─────────────────────────────────────────────────────────────────────────────────


class Sizes(NamedTuple):
    """How the work is divided: powers of two."""

    block: int = BLOCK  # tokens per program
    sub: int = SUB  # tokens whose largest logit is kept; at most ``block``
    short_list: int = LIST
    few: int = FEW  # entries of a short list that are compared in pairs; at most ``short_list``
    each: int = EACH  # nominees of a block
    nominees: int = NOMINEES
    tile: int = BLOCK  # tokens at a time, of a row that is searched bit by bit


class _Rows(NamedTuple):
    """What the launches tell each other of each row."""

    maxima: Tensor  # [rows, subs] int32
    sampled: Tensor  # [rows] int64
    highest: Tensor  # [rows] int32
    pivots: Tensor  # [rows] int32
    listed: Tensor  # [rows] int32
    queue: Tensor  # [rows] int32: rows that their short lists do not decide
    queued: Tensor  # [1] int32: how many
    masses: Tensor  # [rows, blocks] int64


def sample_nodes(
    logits: Tensor, nodes: SampledNodes, tables: SamplingTables, sizes: Sizes | None = None
) -> Tensor:
    """The target's token at every node: [b, T] int64, NO_TOKEN where none can be sampled.

    Args:
        logits: [b, T, V], any float dtype, rows contiguous.
    """
    b, T, V = logits.shape
    sizes = sizes or Sizes()
    logits = logits.reshape(b * T, V)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    prompt_seen, stops = tables.prompt_seen.view(torch.uint8), tables.stops.view(torch.uint8)
    ancestors = nodes.ancestors.contiguous().view(torch.uint8)
    reads = Reads(
        *(tables.flags, logits, logits.stride(0), tables.numbers, tables.integers),
        *(prompt_seen, tables.output_counts, tables.bias, stops, V),
        *(nodes.slots, nodes.positions.contiguous(), nodes.tokens.contiguous(), ancestors, T),
    )
    rows = _empty_rows(b * T, V, sizes, logits.device)
    _find_pivots(rows, reads, sizes)
    _choose_from_lists(rows, reads, sizes)
    _search(rows, reads, sizes)
    return rows.sampled.view(b, T)


def _empty_rows(count: int, V: int, sizes: Sizes, device: torch.device) -> _Rows:
    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    blocks = cdiv(V, sizes.block)
    subs = next_power_of_2(blocks) * (sizes.block // sizes.sub)
    highest, pivots, listed, queue = (integers(count) for _ in range(4))
    return _Rows(
        maxima=integers(count, subs),
        sampled=integers(count, dtype=torch.int64),
        highest=highest,
        pivots=pivots,
        listed=listed,
        queue=queue,
        queued=integers(1),
        masses=integers(count, blocks, dtype=torch.int64),
    )


def _find_pivots(rows: _Rows, reads: Reads, sizes: Sizes) -> None:
    count, blocks = rows.masses.shape
    subs = rows.maxima.shape[1]
    _maxima_kernel[(blocks, count)](
        rows.maxima,
        *reads.arguments,
        SUBS=subs,
        BLOCK=sizes.block,
        SUB=sizes.sub,
        num_warps=_warps(sizes.block),
    )
    _pivot_kernel[(count,)](
        *(rows.maxima, rows.highest, rows.pivots, rows.listed, rows.queued),
        *(reads.flags, reads.integers, reads.slots),
        *(cdiv(reads.V, sizes.sub), reads.T),
        SUBS=subs,
        num_warps=1,  # so that no sum leaves a warp
    )


def _choose_from_lists(rows: _Rows, reads: Reads, sizes: Sizes) -> None:
    count, blocks = rows.masses.shape
    short = rows.sampled.new_empty(count, sizes.short_list)
    winners, few = torch.empty_like(rows.masses), rows.sampled.new_empty(count, sizes.few)
    _collect_kernel[(blocks, count)](
        *(rows.highest, rows.pivots, rows.listed, short, rows.masses, winners, *reads.arguments),
        ID_BITS=_id_bits(reads),
        BLOCK=sizes.block,
        LIST=sizes.short_list,
        num_warps=_warps(sizes.block),
    )
    _choose_kernel[(count,)](
        *(rows.sampled, rows.queue, rows.queued, rows.highest, rows.maxima, rows.listed),
        *(short, few, rows.masses, winners, *reads.arguments, blocks),
        ID_BITS=_id_bits(reads),
        SUBS=rows.maxima.shape[1],
        SUB=sizes.sub,
        BLOCKS=next_power_of_2(blocks),
        LIST=sizes.short_list,
        FEW=sizes.few,
        num_warps=_warps(sizes.short_list),
    )


def _search(rows: _Rows, reads: Reads, sizes: Sizes) -> None:
    """The rows in the queue."""
    count, blocks = rows.masses.shape
    found = rows.sampled.new_empty(count, blocks, sizes.each)
    weights = rows.sampled.new_empty(count, sizes.nominees, blocks)
    pool = {
        "POOL": next_power_of_2(blocks * sizes.each),
        "EACH": sizes.each,
        "NOMINEES": sizes.nominees,
    }
    per_queued, ids = (blocks, min(count, ROWS_AT_ONCE)), _id_bits(reads)
    nominate_kernel[per_queued](
        *(found, rows.queue, rows.queued, rows.highest, *reads.arguments),
        ID_BITS=ids,
        BLOCK=sizes.block,
        EACH=sizes.each,
        num_warps=2 * _warps(sizes.block),
    )
    weigh_kernel[per_queued](
        *(weights, found, rows.queue, rows.queued, rows.highest, *reads.arguments),
        ID_BITS=ids,
        BLOCK=sizes.block,
        **pool,
        num_warps=2 * _warps(sizes.block),
    )
    search_kernel[(count,)](
        *(rows.sampled, found, weights, rows.masses, rows.queue, rows.queued, rows.highest),
        *(*reads.arguments, blocks),
        ID_BITS=ids,
        BLOCK=sizes.tile,
        BLOCKS=next_power_of_2(blocks),
        **pool,
        num_warps=_warps(sizes.tile),
    )


def _id_bits(reads: Reads) -> int:
    """Bits of a token id."""
    return max((reads.V - 1).bit_length(), 1)


def _warps(elements: int) -> int:
    """Eight for a whole block, so that a thread has 16 elements."""
    return max(1, min(8, elements // 512))
