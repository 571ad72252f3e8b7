"""Attention with the same bits in prompts and trees, from the paged pool, on a GPU (``naive.py``).

Both kernels are made of one step, ``_block``, whose products have the same bits for any tile and
instruction (``test_step_sums.py``). The rows of a product are all query heads of a key head, times
the tokens of a tile. Scalar arithmetic that a compiler could fuse is fused or rounded explicitly.

A prompt's program takes all blocks of its tile and joins parts as it goes. So does a tree's where
there are enough of them to keep a GPU busy; else each part has a program of its own, and a second
kernel joins them. Which of the two it is does not change the bits.

Nothing here waits for the device: grids depend on shapes alone, or on the lengths of prompts, which
the host knows.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.exact_attention.triton_pages import BLOCK, COLUMNS, Pages
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import exact_dot, previous_done, rounded_product

LOWEST = tl.constexpr(-1e30)  # below all scores; unlike -inf it can be subtracted from itself
SHORT = tl.constexpr(256)  # positions of the first parts
DOUBLINGS = tl.constexpr(12)  # of a part's size: up to position 2**24
PROGRAMS = 128  # of a tree's launch, from which on each takes whole prefixes
JOINED = 512  # outputs of a program of _join_kernel
JOINED_AT_ONCE = 8  # parts


# ── the definition ──


@triton.jit
def _doubled(shift):
    """The size of a part that was doubled ``shift`` times."""
    return tl.full([], SHORT, tl.int32) << shift


@triton.jit
def _part_size(position):
    """Of the part that ``position`` is in, and how often the first one's was doubled."""
    shift = tl.zeros([], tl.int32)
    for i in tl.static_range(DOUBLINGS):
        shift += tl.where(position >= (_doubled(i) << 4), 1, 0)
    return _doubled(shift), shift


@triton.jit
def _begins_part(position):
    size, _ = _part_size(position)
    return (position & (size - 1)) == 0


@triton.jit
def _block(query, key, value, visible, scale, sums, PRECISION: tl.constexpr):
    """One block of a part: query [M, D]; key, value [BLOCK, D]; visible [M, BLOCK], or None: all.

    sums: of the part so far, as ``_empty`` begins them. scale: times log2(e), positive.
    """
    largest, total, acc = sums
    scores = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    scores = exact_dot(query, tl.trans(key), scores, PRECISION)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    now = tl.maximum(largest, rounded_product(tl.max(scores, 1), scale))
    shrink = tl.exp2(largest - now)
    offset = tl.broadcast_to(-now[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), offset))
    weights = weights.to(value.dtype)
    ones = tl.full([key.shape[0], 16], 1.0, value.dtype)
    total = exact_dot(weights, ones, total * shrink[:, None], PRECISION)
    acc = exact_dot(weights, value, acc * shrink[:, None], PRECISION)
    return now, total, acc


@triton.jit
def _weighted(a, x, b, y):
    """a x + b y, of which the second product is rounded. a, b: [M, N]; x, y: [M]."""
    return tl.fma(a, tl.broadcast_to(x[:, None], a.shape), rounded_product(b, y[:, None]))


@triton.jit
def _join(joined, sums):
    """The parts so far and one more."""
    now = tl.maximum(joined[0], sums[0])
    old, new = tl.exp2(joined[0] - now), tl.exp2(sums[0] - now)
    total = _weighted(joined[1], old, sums[1], new)
    return now, total, _weighted(joined[2], old, sums[2], new)


@triton.jit
def _empty(ROWS: tl.constexpr, DP: tl.constexpr):
    """The largest score so far [ROWS]; relative to it, the sum of weights [ROWS, 16], the same in
    all columns, and that of weighted values [ROWS, DP]."""
    largest = tl.full([ROWS], LOWEST, tl.float32)
    return largest, tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, DP], tl.float32)


@triton.jit
def _begin(begins, joined, sums):
    """Join the last part where a block ``begins`` another one."""
    if begins:
        joined = _join(joined, sums)
        sums = _empty(sums[2].shape[0], sums[2].shape[1])
    return joined, sums


# ── what both kernels do with it ──


@triton.jit
def _blocks(
    query,
    pool_k,
    pool_v,
    table,
    start,
    end,
    own,  # [M]: the last position that each row sees; None: all rows see all positions
    in_slot,
    in_head,
    scale,
    joined,
    sums,
    STRIDE: tl.constexpr,
    JOIN: tl.constexpr,  # where parts begin; else there is one
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The blocks of positions [start, end), of which the last one may be incomplete."""
    for first in tl.range(start, end, BLOCK, num_stages=STAGES):
        if JOIN:
            joined, sums = _begin(_begins_part(first), joined, sums)
        at = first + tl.arange(0, BLOCK)
        visible, seen = None, in_head
        if own is not None:
            visible, seen = at[None, :] <= own[:, None], seen & (at < end)[:, None]
        slot = tl.load(table + tl.minimum(at, end - 1)).to(tl.int64)
        in_pool = slot[:, None] * STRIDE + in_slot
        key = tl.load(pool_k + in_pool, mask=seen, other=0.0)
        value = tl.load(pool_v + in_pool, mask=seen, other=0.0)
        sums = _block(query, key, value, visible, scale, sums, PRECISION)
    return joined, sums


@Staged
@triton.jit
def _prompt_kernel(
    q,  # [n, heads, D], rows q_stride apart
    pool_k,  # [KV slots, kv_heads, D]
    pool_v,
    slot_table,  # [R, positions]
    tiles,  # [·, 4] int32: request slot, first token, tokens, position of the first
    out,  # [n, heads, D]
    scale,
    q_stride,
    positions,
    GROUP: tl.constexpr,  # query heads of a key head
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, padded
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tiles + tl.program_id(0) // KV_HEADS * 4
    table = slot_table + tl.load(tile).to(tl.int64) * positions
    first_token, tokens, position = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)

    d = tl.arange(0, DP)[None, :]
    in_head = d < D
    row = tl.arange(0, ROWS)
    own = position + row // GROUP  # of each row
    is_row = (row // GROUP < tokens)[:, None] & in_head
    token = (first_token + row // GROUP).to(tl.int64)[:, None]
    head = kv_head * GROUP + row[:, None] % GROUP
    query = tl.load(q + token * q_stride + head * D + d, mask=is_row, other=0.0)

    joined, sums = _empty(ROWS, DP), _empty(ROWS, DP)
    in_slot = kv_head * D + d
    start, end = tl.zeros([], tl.int32), position + tokens
    seen_by_all = (position + 1) // BLOCK * BLOCK
    joined, sums = _blocks(
        *(query, pool_k, pool_v, table, start, seen_by_all, None, in_slot, in_head, scale),
        *(joined, sums, KV_HEADS * D, True, PRECISION, STAGES),
    )
    joined, sums = _blocks(
        *(query, pool_k, pool_v, table, seen_by_all, end, own, in_slot, in_head, scale),
        *(joined, sums, KV_HEADS * D, True, PRECISION, STAGES),
    )
    _, total, acc = _join(joined, sums)
    result = acc / tl.max(total, 1)[:, None]
    tl.store(out + (token * (KV_HEADS * GROUP) + head) * D + d, result, mask=is_row)


@Staged
@triton.jit(do_not_specialize=["T", "parts"])
def _tree_kernel(
    q,  # [b*T, heads, D], rows q_stride apart
    k,  # [b*T, kv_heads, D], rows k_stride apart
    v,  # [b*T, kv_heads, D], rows v_stride apart
    pool_k,  # [KV slots, kv_heads, D]
    pool_v,
    slot_table,  # [R, positions]
    slots,  # [b]
    prefix,  # [b]
    own,  # [b, T]: KV slots of the nodes
    masks,  # [b, T] int64
    page_count,  # [b]
    page_of,  # [b, T]
    columns,  # [b, T, COLUMNS]
    out,  # [b*T, heads, D]
    outputs,  # [b, parts, T, heads, D] float32: the sums of each part
    totals,  # [b, parts, T, heads] float32
    largest,  # [b, parts, T, heads] float32
    scale,
    q_stride,
    k_stride,
    v_stride,
    positions,
    T,
    parts,
    GROUP: tl.constexpr,  # query heads of a key head
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, padded
    NODES: tl.constexpr,  # T, padded
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,  # a program takes all parts
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)

    first_row = tl.program_id(0) // KV_HEADS * ROWS
    d = tl.arange(0, DP)[None, :]
    in_head = d < D
    in_slot = kv_head * D + d

    previous_done(OVERLAP)
    length = tl.load(prefix + request).to(tl.int32)
    if WHOLE:
        start, end = tl.zeros([], tl.int32), length + T
    else:
        shift = tl.maximum(part // 8 - 1, 0)
        start = (part - 8 * shift) * _doubled(shift)
        end = tl.minimum(start + _doubled(shift), length + T)
        if start >= end:
            return
    table = slot_table + tl.load(slots + request).to(tl.int64) * positions

    row = first_row + tl.arange(0, ROWS)
    node = row // GROUP
    is_row = node < T
    head = kv_head * GROUP + row % GROUP
    in_rows = is_row[:, None] & in_head
    queries = q + (request * T + node)[:, None] * q_stride + head[:, None] * D + d
    query = tl.load(queries, mask=in_rows, other=0.0)

    joined, sums = _empty(ROWS, DP), _empty(ROWS, DP)
    root = length // BLOCK * BLOCK
    before = tl.minimum(root, end)
    joined, sums = _blocks(
        *(query, pool_k, pool_v, table, start, before, None, in_slot, in_head, scale),
        *(joined, sums, KV_HEADS * D, WHOLE, PRECISION, STAGES),
    )
    pages = tl.load(page_count + request)
    mask = tl.load(masks + request * T + node, mask=is_row, other=0)
    low, high = mask.to(tl.int32)[:, None], (mask >> 32).to(tl.int32)[:, None]
    mine = tl.load(page_of + request * T + node, mask=is_row, other=-1)[:, None]
    start = tl.maximum(root, start)
    for i in tl.range(0, tl.cdiv(end - start, BLOCK) * pages, num_stages=STAGES):
        page, first = i % pages, start + i // pages * BLOCK
        if WHOLE:
            joined, sums = _begin((page == 0) & _begins_part(first), joined, sums)
        at = first + tl.arange(0, BLOCK)
        other = tl.load(columns + (request * T + page) * COLUMNS + (at - root))
        slot = tl.load(table + at, mask=at < length, other=0).to(tl.int64)
        is_node, in_prefix = (other >= 0)[:, None], (at < length)[:, None]
        in_pool = slot[:, None] * (KV_HEADS * D) + in_slot
        new = (request * T + other)[:, None]
        seen = (is_node | in_prefix) & in_head
        at_keys = tl.where(is_node, k + new * k_stride + in_slot, pool_k + in_pool)
        at_values = tl.where(is_node, v + new * v_stride + in_slot, pool_v + in_pool)
        key = tl.load(at_keys, mask=seen, other=0.0)
        value = tl.load(at_values, mask=seen, other=0.0)
        other = other[None, :]
        bit = (tl.where(other < 32, low, high) >> (other & 31)) & 1
        visible = ((other >= 0) & (bit != 0)) | (at < length)[None, :]
        sums = _block(query, key, value, visible & (mine == page), scale, sums, PRECISION)

    if (first_row == 0) & (start == root) & (root < end):  # others read k and v, not the pool
        new = tl.arange(0, NODES)
        is_new = new < T
        slot = tl.load(own + request * T + new, mask=is_new, other=0).to(tl.int64)
        in_pool = slot[:, None] * (KV_HEADS * D) + in_slot
        new, is_new = (request * T + new)[:, None], is_new[:, None] & in_head
        key = tl.load(k + new * k_stride + in_slot, mask=is_new, other=0.0)
        value = tl.load(v + new * v_stride + in_slot, mask=is_new, other=0.0)
        tl.store(pool_k + in_pool, key, mask=is_new)
        tl.store(pool_v + in_pool, value, mask=is_new)
    if WHOLE:
        _, total, acc = _join(joined, sums)
        at = ((request * T + node) * HEADS + head)[:, None] * D + d
        tl.store(out + at, acc / tl.max(total, 1)[:, None], mask=in_rows)
    else:
        at = ((request * parts + part) * T + node) * HEADS + head
        tl.store(outputs + at[:, None] * D + d, sums[2], mask=in_rows)
        tl.store(totals + at, tl.max(sums[1], 1), mask=is_row)
        tl.store(largest + at, sums[0], mask=is_row)


@triton.jit(do_not_specialize=["T", "parts", "rows"])
def _join_kernel(
    outputs,  # [b, parts, rows, D] float32
    totals,  # [b, parts, rows] float32
    largest,  # [b, parts, rows] float32
    prefix,  # [b]
    out,  # [b, rows, D]
    T,
    parts,
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,  # parts that are read at once
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    request = tl.program_id(1).to(tl.int64)
    last = tl.load(prefix + request).to(tl.int32) + T - 1
    size, shift = _part_size(last)
    count = last // size + 8 * shift + 1
    # where rows do not fill the last program, it repeats the last one
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    d = tl.arange(0, DP)[None, :]
    joined = (
        tl.full([ROWS], LOWEST, tl.float32),
        tl.zeros([ROWS, 1], tl.float32),
        tl.zeros([ROWS, DP], tl.float32),
    )
    for first in tl.range(0, count, CHUNK):
        read = ()
        for i in tl.static_range(CHUNK):
            part = tl.full([ROWS], first + i, tl.int32)
            there = part < count
            at = (request * parts + part) * rows + row
            top = tl.load(largest + at, mask=there, other=LOWEST)
            total = tl.load(totals + at, mask=there, other=0.0)
            inside = there[:, None] & (d < D)
            acc = tl.load(outputs + at[:, None] * D + d, mask=inside, other=0.0)
            read += ((top, total[:, None], acc),)
        for i in tl.static_range(CHUNK):
            joined = _join(joined, read[i])
    tl.store(out + (request * rows + row)[:, None] * D + d, joined[2] / joined[1], mask=d < D)


# ── launches ──


class Config(NamedTuple):
    """How the work is divided; the bits do not depend on it."""

    rows: int  # of a tile: a power of two, at least 16
    whole: bool  # of a tree: a program takes all parts
    warps: int
    stages: int  # blocks of keys in flight


def _check(q: Tensor, pool_k: Tensor) -> None:
    if q.dtype != pool_k.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"exact attention over keys in {pool_k.dtype} for queries in {q.dtype}: both must be "
            "bfloat16, float16 or float32 (--kv-cache-dtype auto)"
        )


def _constants(q: Tensor, pool_k: Tensor, config: Config) -> dict[str, object]:
    """What both kernels are compiled for."""
    (_, heads, D), kv_heads = q.shape, pool_k.shape[1]
    return {
        "GROUP": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "D": D,
        "DP": max(16, next_power_of_2(D)),
        "ROWS": config.rows,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "STAGES": config.stages,
        "num_warps": config.warps,
        **overlapping(q.device),
    }


def _largest_tile(head_dim: int, itemsize: int) -> int:
    """float32 does not have to be fast; two sums of 256 channels take twice the registers."""
    return 16 if itemsize > 2 else 128 if head_dim <= 128 else 64


def tree_config(
    batch: int, nodes: int, heads: int, kv_heads: int, head_dim: int, itemsize: int
) -> Config:
    """For Hopper. Slots are loaded a block before keys, so of n stages, (n - 1) // 2 have room for
    keys and values. More of them pay off where a multiprocessor has one program; see
    benchmark/kernels/bench_exact_attention.py."""
    needed = next_power_of_2(nodes * heads // kv_heads)
    rows = min(max(16, needed), _largest_tile(head_dim, itemsize))
    programs = batch * kv_heads * cdiv(nodes * heads // kv_heads, rows)
    warps = 8 if rows > 64 or (rows == 64 and head_dim > 128) else 4
    alone = rows > 64 or (rows < 64 and 4 * programs < PROGRAMS)
    stages = 5 if alone and head_dim * itemsize <= 256 else 3
    return Config(rows, programs >= PROGRAMS, warps, stages)


def num_parts(positions: int) -> int:
    """Of a sequence of ``positions``, at least one."""
    size, shift = SHORT.value, 0
    while 16 * size < positions:
        size, shift = 2 * size, shift + 1
    return cdiv(positions, size) + 8 * shift


def exact_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    prefix: Tensor,
    own: Tensor,
    masks: Tensor,
    pages: Pages,
    scale: float,
    config: Config | None = None,
) -> Tensor:
    """Write the keys and values of the nodes of b trees to the pool; they attend to their prefixes
    and ancestors.

    The nodes of requests that pad a batch share a KV slot that no one else reads; their prefix may
    be 0.

    Args:
        q: [b*T, heads, D]; k, v: [b*T, kv_heads, D]; heads contiguous, rows any stride.
        pool_k, pool_v: [KV slots, kv_heads, D], contiguous, of q's dtype: 16 bits or float32.
        slot_table: [R, positions] integer, contiguous: the KV slots of each request slot.
        slots: [b] integer, request slots; prefix: [b] integer, positions before the root.
        own: [b, T] int64, contiguous: the nodes' KV slots.
        masks: [b, T] int64, contiguous: the nodes that each one sees, as bits.
        pages: what ``lay_out`` made of masks and prefix.
        scale: positive.
    Returns: [b*T, heads, D], dtype of q.
    Raises: ValueError if the pool's dtype is another one, as E4M3.
    """
    _check(q, pool_k)
    (_, heads, D), kv_heads, positions = q.shape, pool_k.shape[1], slot_table.shape[1]
    b, T = own.shape
    q, k, v = (part if part.stride(1) == D else part.contiguous() for part in (q, k, v))
    config = config or tree_config(b, T, heads, kv_heads, D, q.dtype.itemsize)
    parts = num_parts(positions + T)  # where a request ends, nodes may stand beyond the table
    kept, rows = 0 if config.whole else b, T * heads
    shapes = ((kept, parts, rows, D), (kept, parts, rows), (kept, parts, rows))
    sums = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    out = torch.empty(b * T, heads, D, dtype=q.dtype, device=q.device)
    tiles = cdiv(rows // kv_heads, config.rows)
    _tree_kernel[(tiles * kv_heads, 1 if config.whole else parts, b)](
        *(q, k, v, pool_k, pool_v, slot_table, slots, prefix, own, masks, *pages, out, *sums),
        *(scale * math.log2(math.e), q.stride(0), k.stride(0), v.stride(0), positions, T, parts),
        NODES=max(2, next_power_of_2(T)),
        WHOLE=config.whole,
        **_constants(q, pool_k, config),
    )
    return out if config.whole else _join_parts(sums, prefix, T, out)


def _join_parts(sums: list[Tensor], prefix: Tensor, T: int, out: Tensor) -> Tensor:
    """``out``, of the sums of each part: [b, parts, T·heads, D] and twice [b, parts, T·heads]."""
    b, parts, n, D = sums[0].shape
    padded = next_power_of_2(D)
    rows = max(1, JOINED // padded)
    _join_kernel[(cdiv(n, rows), b)](
        *(*sums, prefix, out, T, parts, n),
        D=D,
        DP=padded,
        ROWS=rows,
        CHUNK=min(JOINED_AT_ONCE, parts),
        num_warps=4,
        **overlapping(out.device),
    )
    return out


def prompt_config(heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Config:
    """For Hopper. A tile has room for at least one token."""
    least = max(16, next_power_of_2(heads // kv_heads))
    rows = max(least, _largest_tile(head_dim, itemsize))
    warps = 8 if rows >= 128 or head_dim > 128 else 4
    return Config(rows, True, warps, 5 if head_dim * itemsize <= 256 else 3)


def prompt_tiles(
    chunks: Iterable[tuple[int, int, int]], tokens: int
) -> list[tuple[int, int, int, int]]:
    """Tiles of at most ``tokens`` tokens, those with most work first, as the kernel reads them.

    chunks: request slot, first position and tokens of each, as they lie one after the other.
    """
    tiles, first = [], 0
    for slot, start, length in chunks:
        for offset in range(0, length, tokens):
            size = min(tokens, length - offset)
            tiles.append((slot, first + offset, size, start + offset))
        first += length
    return sorted(tiles, key=lambda tile: -tile[3])


def exact_prompt_attention(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slot_table: Tensor,
    tiles: Tensor,
    scale: float,
    config: Config,
) -> Tensor:
    """The tokens of prompt chunks attend to themselves and to all before them in their requests;
    their keys and values are in the pool.

    Args:
        q: [n, heads, D], the chunks concatenated; heads contiguous, rows any stride.
        pool_k, pool_v, slot_table, scale: as for ``exact_tree_attention``.
        tiles: [·, 4] int32, contiguous: ``prompt_tiles`` of ``config.rows`` over the query heads of
            a key head.
    Returns: [n, heads, D], dtype of q.
    Raises: ValueError if the pool's dtype is another one, as E4M3.
    """
    _check(q, pool_k)
    D, kv_heads = q.shape[2], pool_k.shape[1]
    q = q if q.stride(1) == D else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _prompt_kernel[(len(tiles) * kv_heads,)](
        *(q, pool_k, pool_v, slot_table, tiles, out),
        *(scale * math.log2(math.e), q.stride(0), slot_table.shape[1]),
        **_constants(q, pool_k, config),
    )
    return out
