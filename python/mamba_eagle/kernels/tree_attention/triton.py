"""Attention of tree nodes and of drafted blocks, straight from the paged pool, on a GPU: one or two
launches.

The rows of one matrix product with a block of keys are all query heads of a key head, times the
nodes. The prefix of a request is divided into shares, as many as the grid has room for. A program
takes one share; the program of the last share also takes the tree, and so writes the new keys and
values to the pool. A second kernel joins the shares of each row by their log-sum-exp (flash
decoding, https://pytorch.org/blog/flash-decoding/).

Nothing here waits for the device. The grid depends on shapes alone, as a captured graph requires:
the device determines how many shares a prefix has, and programs without a share end at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import E4M3
from mamba_eagle.kernels.float8.triton import to_e4m3
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import exact_dot, previous_done

WORD = tl.constexpr(64)  # nodes of one integer of a bit mask
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below all scores; unlike -inf it can be subtracted from itself


class Config(NamedTuple):
    """How the work is divided; the result depends on it by rounding only."""

    rows: int  # nodes × query heads of a key head, per program: a power of two, at least 16
    keys: int  # per iteration of a program: a power of two, at least 16
    splits: int  # shares of a prefix at most: a power of two
    least: int  # keys of a share at least, except the last: a multiple of ``keys``
    warps: int
    stages: int  # blocks of keys in flight


@triton.jit
def _attend(q, key, value, visible, scale, largest, total, acc, PRECISION: tl.constexpr):
    """One step of the online softmax, in base 2: q [M, D]; key, value [N, D]; visible [M, N].

    largest, total: [M], the largest score so far and the sum of weights relative to it; acc [M, D].
    """
    scores = tl.zeros([q.shape[0], key.shape[0]], tl.float32)
    scores = exact_dot(q, tl.trans(key), scores, PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    now = tl.maximum(largest, tl.max(scores, 1))
    shrink = tl.exp2(largest - now)
    weights = tl.exp2(scores - now[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = exact_dot(weights.to(value.dtype), value, acc * shrink[:, None], PRECISION)
    return now, total, acc


@triton.jit
def _share(length, splits, least, KEYS: tl.constexpr):
    """Keys per share of a prefix, and the number of shares: at least one, even if it is empty."""
    size = tl.maximum(tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS, least)
    return size, tl.maximum(tl.cdiv(length, size), 1)


@triton.jit
def _begin(length, window, HAS_WINDOW: tl.constexpr):
    """The first position of a prefix that any node sees."""
    if HAS_WINDOW:
        return tl.maximum(length - window + 1, 0)
    return 0


# not specialized: other numbers of lanes or requests should not need new machine code
@Staged
@triton.jit(do_not_specialize=["E", "splits", "least", "window"])
def _tree_attention_kernel(
    q,  # [b*T, heads, D], rows q_stride and heads q_head_stride apart
    k,  # [b*T, kv_heads, D], rows k_stride apart
    v,  # [b*T, kv_heads, D], rows v_stride apart
    pool_k,  # [KV slots, kv_heads, D]
    pool_v,
    slot_table,  # [R, positions]
    slots,  # [b]
    prefix,  # [b]
    own,  # [b, E]
    masks,  # [b, T, WORDS]
    out,  # [b*T, heads, D]
    parts,  # [b, splits, T, heads, D] float32: outputs of the shares
    sizes,  # [b, splits, T, heads] float32: log2 of their sums of weights
    sinks,  # [heads]: logits of keys without values, or None
    window,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    v_stride,
    positions,
    T,
    E,
    splits,
    least,
    GROUP: tl.constexpr,  # query heads of a key head
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, padded
    NODES: tl.constexpr,  # of a word of the masks, padded
    WORDS: tl.constexpr,
    HAS_OLD: tl.constexpr,  # some nodes are already in the pool
    FLOAT8: tl.constexpr,  # the pool is E4M3, and queries set the precision
    HAS_WINDOW: tl.constexpr,  # node i, at position prefix + i, sees so far back only
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    first_row = tl.program_id(0) // KV_HEADS * ROWS
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)

    previous_done(OVERLAP)
    length = tl.load(prefix + request).to(tl.int32)
    table = slot_table + tl.load(slots + request).to(tl.int64) * positions
    begin = _begin(length, window, HAS_WINDOW)
    share, shares = _share(length - begin, splits, least, KEYS)
    if split >= shares:
        return

    d = tl.arange(0, DP)
    in_head = d < D
    row = first_row + tl.arange(0, ROWS)
    node = row // GROUP
    is_row = node < T
    head = kv_head * GROUP + row % GROUP
    in_rows = is_row[:, None] & in_head[None, :]
    queries = q + (request * T + node)[:, None] * q_stride + d[None, :]
    queries += head[:, None] * q_head_stride
    query = tl.load(queries, mask=in_rows, other=0.0)
    if not FLOAT8:
        query = query.to(pool_k.dtype.element_ty)

    largest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    if sinks is not None:  # part of the last share
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.where(split == shares - 1, sink, largest)
        total = tl.where(split == shares - 1, 1.0, total)
    scale *= LOG2_E
    in_slot = kv_head * D + d[None, :]
    start = begin + split * share
    end = tl.minimum(start + share, length)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        position = first + tl.arange(0, KEYS)
        seen = position < end
        slot = tl.load(table + position, mask=seen, other=0).to(tl.int64)
        at = slot[:, None] * (KV_HEADS * D) + in_slot
        in_keys = seen[:, None] & in_head[None, :]
        key = tl.load(pool_k + at, mask=in_keys, other=0.0)
        value = tl.load(pool_v + at, mask=in_keys, other=0.0)
        if FLOAT8:
            key, value = key.to(query.dtype), value.to(query.dtype)
        visible = seen[None, :]
        if HAS_WINDOW:
            visible = visible & (position[None, :] > (length + node - window)[:, None])
        largest, total, acc = _attend(
            query, key, value, visible, scale, largest, total, acc, PRECISION
        )

    if split == shares - 1:
        for word in tl.static_range(WORDS):
            bit = tl.arange(0, NODES)
            member = word * WORD + bit
            exists = member < E
            fresh = member - (E - T)  # which of the new nodes
            is_new = exists & (fresh >= 0)
            slot = tl.load(own + request * E + member, mask=exists, other=0).to(tl.int64)
            at = slot[:, None] * (KV_HEADS * D) + in_slot
            in_new = is_new[:, None] & in_head[None, :]
            source = request * T + fresh
            key = tl.load(k + source[:, None] * k_stride + in_slot, mask=in_new, other=0.0)
            value = tl.load(v + source[:, None] * v_stride + in_slot, mask=in_new, other=0.0)
            if FLOAT8:
                key, value = to_e4m3(key.to(tl.float32)), to_e4m3(value.to(tl.float32))
            else:
                key = key.to(pool_k.dtype.element_ty)
                value = value.to(pool_v.dtype.element_ty)
            if first_row == 0:
                tl.store(pool_k + at, key, mask=in_new)
                tl.store(pool_v + at, value, mask=in_new)
            if HAS_OLD:
                in_old = (exists & (fresh < 0))[:, None] & in_head[None, :]
                old_key = tl.load(pool_k + at, mask=in_old, other=0.0)
                old_value = tl.load(pool_v + at, mask=in_old, other=0.0)
                key = tl.where(is_new[:, None], key, old_key)
                value = tl.where(is_new[:, None], value, old_value)
            if FLOAT8:
                key, value = key.to(query.dtype), value.to(query.dtype)
            mask = tl.load(masks + (request * T + node) * WORDS + word, mask=is_row, other=0)
            visible = ((mask[:, None] >> bit.to(tl.int64)[None, :]) & 1) != 0
            largest, total, acc = _attend(
                query, key, value, visible, scale, largest, total, acc, PRECISION
            )

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (request * T + node) * HEADS + head
    if shares == 1:
        outputs = out + at[:, None] * D + d[None, :]
        tl.store(outputs, result, mask=in_rows)
    else:
        at = (request * splits + split) * T * HEADS + node * HEADS + head
        tl.store(parts + at[:, None] * D + d[None, :], result, mask=in_rows)
        tl.store(sizes + at, largest + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["rows", "splits", "least", "window"])
def _join_kernel(
    parts,  # [b, splits, rows, D] float32
    sizes,  # [b, splits, rows] float32
    prefix,  # [b]
    out,  # [b, rows, D]
    rows,
    splits,
    least,
    window,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,  # shares that are read at once
    HAS_WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = the mean of the shares' outputs, weighted by their sums of weights."""
    previous_done(OVERLAP)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(prefix + request).to(tl.int32)
    begin = _begin(length, window, HAS_WINDOW)
    _, shares = _share(length - begin, splits, least, KEYS)
    if shares == 1:
        return
    # where rows do not fill the last program, it repeats the last one
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    d = tl.arange(0, DP)[None, :]
    largest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for first in tl.range(0, shares, CHUNK):
        read = ()
        for i in tl.static_range(CHUNK):
            split = tl.full([ROWS], first + i, tl.int32)
            at = (request * splits + split) * rows + row
            size = tl.load(sizes + at, mask=split < shares, other=LOWEST)
            inside = (split < shares)[:, None] & (d < D)
            part = tl.load(parts + at[:, None] * D + d, mask=inside, other=0.0)
            read += ((size, part),)
        now = largest
        for i in tl.static_range(CHUNK):
            now = tl.maximum(now, read[i][0])
        shrink = tl.exp2(largest - now)
        largest, total, acc = now, total * shrink, acc * shrink[:, None]
        for i in tl.static_range(CHUNK):
            weight = tl.exp2(read[i][0] - now)
            total += weight
            acc += read[i][1] * weight[:, None]
    outputs = out + (request * rows + row)[:, None] * D + d
    tl.store(outputs, acc / total[:, None], mask=d < D)


PROGRAMS = 256  # about two for each of a Hopper GPU's 132 multiprocessors
MAX_SPLITS = 32
JOINED = 512  # outputs of a program of _join_kernel
JOINED_AT_ONCE = 8  # shares


def choose_config(
    batch: int, nodes: int, heads: int, kv_heads: int, head_dim: int, positions: int, itemsize: int
) -> Config:
    """For Hopper. positions: of the slot table, which limits the length of a prefix.

    One tile of rows where they fit, since each tile reads all keys; then as many shares as give
    every multiprocessor two programs. Measured with benchmark/kernels/bench_tree_attention.py; see
    benchmark/kernels.md.
    """
    wide = max(1, next_power_of_2(head_dim) * itemsize // 256)  # 1: 128 channels of 16 bits
    needed = next_power_of_2(nodes * heads // kv_heads)
    rows = min(max(16, needed), max(16, 128 // wide))
    if itemsize > 2:
        # from 64 rows on, products use wgmma, for which ptxas 12.8 generates code that reads
        # outside of shared memory; float32 does not have to be fast
        rows = min(rows, 32)
    tiles = cdiv(nodes * heads // kv_heads, rows)
    splits, programs = 1, batch * kv_heads * tiles
    # from 16 shares on, joining more costs more than a second program saves
    while splits < MAX_SPLITS and splits * 2 * programs <= PROGRAMS // (1 if splits < 16 else 2):
        splits *= 2
    # on a short prefix, joining shares costs more than it saves unless the device is nearly idle
    least = max(64, rows) if splits > 8 else 256
    most = next_power_of_2(cdiv(positions, least))
    warps = 8 if rows > 64 else 4
    if splits == 1 and rows == 16 and wide == 1:
        return Config(rows, 128, 1, least, warps, 2)
    keys, stages = max(16, 64 // wide), 5
    if itemsize > 2 or wide > 2:
        stages = 2 if wide > 1 else 3
    elif wide == 2 and rows == 32:
        keys, stages = 64, 3
    return Config(rows, keys, min(splits, most), least, warps, stages)


def paged_tree_attention(
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
    scale: float,
    config: Config | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the new nodes' keys and values to the pool; they attend to prefix and ancestors.

    b trees (or forests) of E nodes. The last T nodes are new; the others are already in the pool.
    The nodes of requests that pad a batch share a KV slot that no one reads; their prefix may be 0.

    Args:
        q: [b*T, heads, D], rows and heads any stride; k, v: [b*T, kv_heads, D], rows any stride.
        pool_k, pool_v: [KV slots, kv_heads, D], contiguous; they set the precision: bfloat16,
            float16 or float32; as E4M3 they are widened to q's dtype. Softmax and sums are float32.
        slot_table: [R, positions] integer, contiguous: the KV slots of each request slot.
        slots: [b] integer, request slots; prefix: [b] integer, positions that a tree's nodes see.
        own: [b, E] int64, contiguous: the nodes' KV slots; none of them is in a prefix.
        masks: [b, T, words] int64, contiguous: which nodes each new one sees (``pack_paths``).
        window: of its prefix, new node i sees the positions above ``prefix + i - window`` only, as
            a row of a block at position prefix + i does; 0: all.
        sinks: [heads], a logit per query head that takes part in the softmax and has no value.
    Returns: [b*T, heads, D], dtype of q.
    """
    (b, T, _), E = masks.shape, own.shape[1]
    (_, heads, D), kv_heads, positions = q.shape, k.shape[1], slot_table.shape[1]
    k, v = (part if part.stride(1) == D else part.contiguous() for part in (k, v))
    precise = q.dtype if pool_k.dtype == E4M3 else pool_k.dtype
    config = config or choose_config(b, T, heads, kv_heads, D, positions, precise.itemsize)
    out = torch.empty(b * T, heads, D, dtype=q.dtype, device=q.device)
    shares = _empty_shares(b, config.splits, T * heads, D, q.device)
    tensors = (q, k, v, pool_k, pool_v, slot_table, slots, prefix, own, masks, out, *shares)
    strides = (*q.stride()[:2], k.stride(0), v.stride(0), positions)
    tiles = cdiv(T * heads // kv_heads, config.rows)
    _tree_attention_kernel[(tiles * kv_heads, config.splits, b)](
        *(*tensors, sinks, window, scale, *strides, T, E, config.splits, config.least),
        **_sizes(q, k, own, masks),
        FLOAT8=pool_k.dtype == E4M3,
        HAS_WINDOW=window > 0,
        ROWS=config.rows,
        KEYS=config.keys,
        PRECISION="tf32" if precise != torch.float32 else "tf32x3",
        STAGES=config.stages,
        num_warps=config.warps,
        **overlapping(q.device),
    )
    return _join(shares, prefix, out, config, window)


def _sizes(q: Tensor, k: Tensor, own: Tensor, masks: Tensor) -> dict[str, int]:
    """What the kernel is compiled for."""
    (_, heads, D), kv_heads = q.shape, k.shape[1]
    (_, T, words), E = masks.shape, own.shape[1]
    return {
        "GROUP": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "D": D,
        "DP": max(16, next_power_of_2(D)),
        "NODES": max(16, min(64, next_power_of_2(E))),
        "WORDS": words,
        "HAS_OLD": E > T,
    }


class _Shares(NamedTuple):
    """What the shares of the prefixes leave to be joined; n is T times the heads."""

    outputs: Tensor  # [b, splits, n, D] float32
    sizes: Tensor  # [b, splits, n] float32: log2 of their sums of weights


def _empty_shares(b: int, splits: int, n: int, D: int, device: torch.device) -> _Shares:
    kept = b if splits > 1 else 0  # the only share of a prefix writes its result at once
    shapes = ((kept, splits, n, D), (kept, splits, n))
    return _Shares(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def _join(shares: _Shares, prefix: Tensor, out: Tensor, config: Config, window: int) -> Tensor:
    """``out`` [b*T, heads, D], joined from shares where prefixes have several."""
    b, splits, n, D = shares.outputs.shape
    if splits == 1:
        return out
    padded = next_power_of_2(D)
    rows = max(1, JOINED // padded)
    _join_kernel[(cdiv(n, rows), b)](
        *(*shares, prefix, out, n, splits, config.least, window),
        D=D,
        DP=padded,
        ROWS=rows,
        KEYS=config.keys,
        CHUNK=min(JOINED_AT_ONCE, splits),
        HAS_WINDOW=window > 0,
        num_warps=4,
        **overlapping(out.device),
    )
    return out
