"""Taking and adding a drafter's pending entries (backend/pending.py) on a GPU, one program per
request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2


@triton.jit(do_not_specialize=["E", "width", "positions", "padding_slot"])
def _take_kernel(
    slots,  # [b]
    counts,  # [b]; None: take all entries that wait
    remaining,  # [R]
    processed,  # [R]
    pending,  # [R]
    pending_tokens,  # [R, width]
    kv_slots,  # [R, positions]
    nodes_out,  # [b, E]
    tokens_out,  # [b, E]
    counts_out,  # [b]
    finished_out,  # [b] uint8
    prefix_out,  # [b]
    kv_slots_out,  # [b, E]
    positions_out,  # [b, E]
    E,
    width,
    positions,
    padding_slot,
    EP: tl.constexpr,  # E, padded
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    prefix = tl.load(processed + slot)
    waiting = tl.load(pending + slot)
    if counts is None:
        count = tl.where(tl.load(remaining + slot) > 0, tl.maximum(waiting, 0), 0)
    else:
        count = tl.load(counts + request)
    entry = tl.arange(0, EP)
    inside = entry < E
    token = tl.load(pending_tokens + slot * width + entry, mask=inside, other=0)
    is_run = inside & (entry < count)
    place = tl.load(kv_slots + slot * positions + prefix + entry, mask=is_run, other=padding_slot)
    node = tl.minimum(entry, tl.maximum(count - 1, 0))
    to = request * E + entry
    tl.store(nodes_out + to, node, mask=inside)
    tl.store(tokens_out + to, token, mask=inside)
    tl.store(kv_slots_out + to, place, mask=inside)
    tl.store(positions_out + to, prefix + entry, mask=inside)
    tl.store(counts_out + request, count)
    tl.store(finished_out + request, (count == 0).to(tl.uint8))
    tl.store(prefix_out + request, prefix)
    tl.debug_barrier()  # read everything before writing anything
    tl.store(processed + slot, prefix + count)
    if counts is None:
        tl.store(pending + slot, waiting - count)


def take_pending(
    slots: Tensor,
    counts: Tensor | None,
    remaining: Tensor,
    processed: Tensor,
    pending: Tensor,
    pending_tokens: Tensor,
    kv_slots: Tensor,
    padding_slot: int,
    nodes: Tensor,
    tokens: Tensor,
    count: Tensor,
    finished: Tensor,
    prefix: Tensor,
    own: Tensor,
    positions: Tensor,
) -> None:
    """The first pending entries of each request are about to be run; ``processed`` counts them.

    Args:
        slots: [b]; counts: [b], how many of each. None: all that wait, if the request has not
            ended, and they are no longer pending; a negative ``pending`` counts as none.
        remaining, processed, pending: [R]; pending_tokens: [R, width]; kv_slots: [R, positions].
        Out: nodes, tokens: [b, E], at most E entries; count: [b]; finished: [b] bool; prefix: [b],
            entries run before; own: [b, E], KV slots, ``padding_slot`` where there is no entry;
            positions: [b, E]. All but ``finished`` are int64.
    """
    b, E = nodes.shape
    _take_kernel[(b,)](
        *(slots, counts, remaining, processed, pending, pending_tokens, kv_slots, nodes, tokens),
        *(count, finished.view(torch.uint8), prefix, own, positions),
        *(E, pending_tokens.shape[1], kv_slots.shape[1], padding_slot),
        EP=next_power_of_2(E),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["width"])
def _append_kernel(
    slots,  # [b]
    tokens,  # [b, D]
    count,  # [b]
    entries,  # [b, D, F]
    pending_tokens,  # [R, width]
    pending_features,  # [R, width, F]
    pending,  # [R]
    width,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, padded
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    waiting = tl.load(pending + slot)
    kept = tl.where(waiting < 0, 0, tl.load(count + request))
    first = slot * width + waiting
    step = tl.arange(0, DP)
    token = tl.load(tokens + request * D + step, mask=step < kept, other=0)
    tl.store(pending_tokens + first + step, token, mask=step < kept)
    for i in tl.range(0, kept.to(tl.int32)):
        for block in tl.range(0, F, BLOCK):
            column = block + tl.arange(0, BLOCK)
            made = tl.load(entries + (request * D + i) * F + column, mask=column < F)
            tl.store(pending_features + (first + i) * F + column, made, mask=column < F)
    tl.debug_barrier()  # all threads have read where it begins
    tl.store(pending + slot, waiting + kept)


def append_pending(
    slots: Tensor,
    tokens: Tensor,
    count: Tensor,
    entries: Tensor,
    pending_tokens: Tensor,
    pending_features: Tensor,
    pending: Tensor,
) -> None:
    """Accepted tokens join the entries that wait for the drafter.

    Args:
        slots, count: [b]; tokens: [b, D]; entries: [b, D, F], their features, any float dtype.
        Changed, by request slot: pending_tokens [R, width], pending_features [R, width, F],
            pending [R]; nothing where ``pending`` is negative.
    """
    b, D, F = entries.shape
    _append_kernel[(b,)](
        *(slots, tokens, count, entries.contiguous(), pending_tokens, pending_features, pending),
        pending_tokens.shape[1],
        D=D,
        DP=next_power_of_2(D),
        F=F,
        BLOCK=min(2048, next_power_of_2(max(F, 1))),
        num_warps=4 if F else 1,
    )
