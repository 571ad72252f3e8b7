"""Rows whose short list does not decide: nothing is known of them but their logits.

    nominate  noise, then the best scores of each block, as if all tokens were kept
    weigh     how much ranks before each of a row's nominees, by blocks of the vocabulary
    search    the best nominee that is kept; else thresholds and noise over the whole row

The best of all scores belongs to a token that is kept with a chance of about top-p. If it is not
kept, the next one may be: the first that the filters keep is the token. A token is kept if fewer
than top-k tokens, or less than the mass of top-p, rank before it, which is one sum and takes no
threshold. So a flat distribution is decided by sums over all blocks at once. The thresholds, bit by
bit and by one program per row, are left for rows with top-k and top-p both, and for those whose
nominees are all filtered away.

Only the best EACH scores of a block are nominees. What is below the last of a full block is not
looked at: a better one of that block may be missing.
"""

import triton
import triton.language as tl

from mamba_eagle.kernels.sampling.triton_rows import (
    ANY_PLACE,
    MOST,
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
    key_token,
    mass_limit,
    mass_of,
    noise_key_of,
    noisy_key,
    number_of,
    rising_of,
    row_of,
    token_of,
)

UNLIKELY = tl.constexpr(13.8)  # -log of the share of rows whose nominees are all filtered away


@triton.jit
def _by_one_filter(asked):
    return (asks(asked, TOP_K) & asks(asked, TOP_P)) == 0


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def nominate_kernel(
    nominees,  # [rows, blocks, EACH] int64, out: keys of the best scores; -1: none
    queue,  # [rows] int32, the rows to search
    queued,  # [1] int32, how many
    highest,
    tables,
    slots,
    positions,
    tree_tokens,
    ancestors,
    T,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    reads = Reads(*tables, slots, positions, tree_tokens, ancestors, T)
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    for place in range(tl.program_id(1), tl.load(queued), tl.num_programs(1)):
        row = row_of(tl.load(queue + place).to(tl.int64), reads)
        if _by_one_filter(row.asked):
            x = adjusted(token, row, reads)
            high = float_of(tl.load(highest + row.number))
            kept = (token < reads.V) & above_floor(x, high, row, reads)
            noise_key = noise_key_of(row, reads)
            temperature = number_of(reads.numbers, row.slot, TEMPERATURE)
            scored = noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
            at = (row.number * tl.num_programs(0) + block) * EACH
            for rank in tl.static_range(EACH):
                best = tl.max(scored, 0)
                tl.store(nominees + at + rank, best)
                scored = tl.where(scored == best, -1, scored)


@triton.jit
def _tries(top_p, asked, NOMINEES: tl.constexpr):
    """How many nominees are worth their sums: each is kept with a chance of about top-p."""
    tries = tl.full([], NOMINEES, tl.int32)
    if asks(asked, TOP_P):
        wanted = UNLIKELY / tl.maximum(-tl.log(1.0 - top_p), 0.001)
        tries = tl.minimum(wanted, NOMINEES - 1.0).to(tl.int32) + 1
    return tries


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def weigh_kernel(
    weights,  # [rows, NOMINEES, blocks] int64, out: of what ranks before each; -1: not summed
    nominees,  # [rows, blocks, EACH]
    queue,
    queued,
    highest,
    tables,
    slots,
    positions,
    tree_tokens,
    ancestors,
    T,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL: tl.constexpr,  # blocks·EACH, padded
    EACH: tl.constexpr,
    NOMINEES: tl.constexpr,
):
    reads = Reads(*tables, slots, positions, tree_tokens, ancestors, T)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    for place in range(tl.program_id(1), tl.load(queued), tl.num_programs(1)):
        row = row_of(tl.load(queue + place).to(tl.int64), reads)
        if _by_one_filter(row.asked):
            x = adjusted(token, row, reads)
            key = key_of(rising_of(x), token, ID_BITS)
            weight = (token < reads.V).to(tl.int64)
            if asks(row.asked, TOP_P):
                high = float_of(tl.load(highest + row.number))
                temperature = number_of(reads.numbers, row.slot, TEMPERATURE)
                weight = tl.where(token < reads.V, mass_of(x, high, temperature), 0)
            tries = _tries(number_of(reads.numbers, row.slot, TOP_P), row.asked, NOMINEES)
            at = weights + row.number * NOMINEES * blocks + block
            others = tl.arange(0, NOMINEES)
            tl.store(at + others * blocks, tl.full([NOMINEES], -1, tl.int64), mask=others >= tries)
            known = tl.arange(0, POOL)
            own = nominees + row.number * blocks * EACH
            pool = tl.load(own + known, mask=known < blocks * EACH, other=-1)
            for rank in range(tries):
                best = tl.max(pool, 0)
                pool = tl.where(pool == best, -1, pool)
                one = key_token(best, ID_BITS).to(tl.int32) + tl.arange(0, 1)
                y = adjusted(one, row, reads)
                its = tl.max(key_of(rising_of(y), one, ID_BITS), 0)
                tl.store(at + rank * blocks, tl.sum(tl.where(key > its, weight, 0), 0))


@triton.jit
def _row_weight(
    least,
    high,
    temperature,
    row,
    reads,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """How many tokens have keys >= ``least``, or their mass: over the whole row, int64."""
    reached = tl.zeros([], tl.int64)
    for begin in range(0, reads.V, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = adjusted(token, row, reads)
        chosen = (token < reads.V) & (key_of(rising_of(x), token, ID_BITS) >= least)
        if BY_MASS:
            reached += tl.sum(tl.where(chosen, mass_of(x, high, temperature), 0), 0)
        else:
            reached += tl.sum(chosen.to(tl.int64), 0)
    return reached


@triton.jit
def _best_nominee(
    row,
    reads,
    nominees,
    weights,
    masses,
    blocks,
    POOL: tl.constexpr,
    BLOCKS: tl.constexpr,
    EACH: tl.constexpr,
    NOMINEES: tl.constexpr,
):
    """The key of the best score that is kept; -1 if no nominee is."""
    block = tl.arange(0, BLOCKS)
    limit = integer_of(reads.integers, row.slot, MOST)
    if asks(row.asked, TOP_P):
        parts = tl.load(masses + row.number * blocks + block, mask=block < blocks, other=0)
        limit = mass_limit(tl.sum(parts, 0), number_of(reads.numbers, row.slot, TOP_P))
    own = nominees + row.number * blocks * EACH
    last = tl.load(own + block * EACH + EACH - 1, mask=block < blocks, other=-1)
    complete = tl.max(last, 0)  # down to this score all are known
    known = tl.arange(0, POOL)
    pool = tl.load(own + known, mask=known < blocks * EACH, other=-1)
    found = tl.full([], -1, tl.int64)
    for rank in range(NOMINEES):
        best = tl.max(pool, 0)
        pool = tl.where(pool == best, -1, pool)
        at = weights + (row.number * NOMINEES + rank) * blocks + block
        before = tl.sum(tl.load(at, mask=block < blocks, other=0), 0)
        kept = (best >= complete) & (before >= 0) & (before < limit)
        found = tl.where((found < 0) & kept, best, found)
    return found


@triton.jit
def _best_of_row(
    top,  # the largest logit's rising number
    row,
    reads,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key of the best score that is kept: thresholds bit by bit, then noise."""
    BITS: tl.constexpr = 32 + ID_BITS
    temperature, high = number_of(reads.numbers, row.slot, TEMPERATURE), float_of(top)
    one = tl.full([], 1, tl.int64)
    kth = tl.zeros([], tl.int64)
    if asks(row.asked, TOP_K):
        limit = integer_of(reads.integers, row.slot, MOST)
        for step in range(BITS):
            trial = kth | (one << (BITS - 1 - step))
            reached = _row_weight(trial, high, temperature, row, reads, ID_BITS, BLOCK, False)
            kth = tl.where(reached >= limit, trial, kth)
    lowest = kth
    if asks(row.asked, TOP_P):
        limit = tl.zeros([], tl.int64)
        lowest = tl.zeros([], tl.int64)
        for step in range(BITS + 1):  # first the total
            bit = one << tl.minimum(BITS - step, BITS - 1)
            trial = tl.where(step == 0, kth, lowest | bit)
            reached = _row_weight(
                tl.maximum(trial, kth), high, temperature, row, reads, ID_BITS, BLOCK, True
            )
            if step == 0:
                limit = mass_limit(reached, number_of(reads.numbers, row.slot, TOP_P))
            else:
                lowest = tl.where(reached >= limit, trial, lowest)
        lowest = tl.maximum(lowest, kth)
    noise_key = noise_key_of(row, reads)
    best = tl.full([], -1, tl.int64)
    for begin in range(0, reads.V, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = adjusted(token, row, reads)
        kept = (token < reads.V) & (key_of(rising_of(x), token, ID_BITS) >= lowest)
        kept = kept & above_floor(x, high, row, reads)
        scored = noisy_key(x, kept, token, noise_key, temperature, ID_BITS)
        best = tl.maximum(best, tl.max(scored, 0))
    return best


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=ANY_PLACE)
def search_kernel(
    sampled,  # [rows] int64, out for the rows in the queue
    nominees,
    weights,
    masses,
    queue,
    queued,
    highest,
    tables,
    slots,
    positions,
    tree_tokens,
    ancestors,
    T,
    blocks,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL: tl.constexpr,
    BLOCKS: tl.constexpr,  # padded
    EACH: tl.constexpr,
    NOMINEES: tl.constexpr,
):
    reads = Reads(*tables, slots, positions, tree_tokens, ancestors, T)
    place = tl.program_id(0)
    if place < tl.load(queued):
        row = row_of(tl.load(queue + place).to(tl.int64), reads)
        best = tl.full([], -1, tl.int64)
        if _by_one_filter(row.asked):
            best = _best_nominee(
                row, reads, nominees, weights, masses, blocks, POOL, BLOCKS, EACH, NOMINEES
            )
        if best < 0:
            best = _best_of_row(tl.load(highest + row.number), row, reads, ID_BITS, BLOCK)
        tl.store(sampled + row.number, token_of(best, ID_BITS))
