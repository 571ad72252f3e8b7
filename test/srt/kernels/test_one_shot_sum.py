"""Sums pushed between ranks, in Triton's interpreter (test_float8.py starts it): a process per
rank, with memory that all of them see, in place of GPUs that reach each other's."""

from __future__ import annotations

import multiprocessing as mp
import time
from typing import Any

import pytest
import torch
from forms import INTERPRETED
from torch import Tensor

from mamba_eagle.kernels.one_shot_sum import naive

SIZE, TOKENS, PROGRAMS, EPS = 24, 5, 2, 1e-5
CALLS = [5, 1, 3, 2, 4]  # tokens; programs take turns with them, and buffers with calls
WAIT_SECONDS, LATE_SECONDS = 60, 0.02


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts_of(call: int, n: int, ranks: int) -> Tensor:
    return normal(call, ranks, n, SIZE)


def add_up(rank: int, ranks: int, rooms: list[Tensor], flags: list[Tensor], results: Any) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from mamba_eagle.kernels.one_shot_sum.triton import Peers, pushed_sum, pushed_sum_norm

    if rank == 0:  # late to read what others have written: they are in the next call by then
        InterpreterBuilder.create_barrier = lambda self: time.sleep(LATE_SECONDS)
    torch.set_num_threads(1)
    places = [torch.tensor([x.data_ptr() for x in each]) for each in (rooms, flags)]
    clock = torch.zeros(2, dtype=torch.int64)
    peers = Peers(*places, clock, rank, ranks, TOKENS, PROGRAMS)
    for call, n in enumerate(CALLS):
        part, stream = parts_of(call, n, ranks)[rank].clone(), normal(-call - 1, n, SIZE)
        if call % 2:
            normed = pushed_sum_norm(stream, part, normal(99, SIZE), EPS, peers)
            results.put((rank, call, normed.numpy(), stream.numpy()))
        else:
            results.put((rank, call, pushed_sum(part, peers).numpy(), None))
    assert clock.tolist() == [len(CALLS), 0]


@pytest.mark.skipif(not INTERPRETED, reason="test_float8.py runs it")
def test_all_ranks_get_the_same_sum_whatever_the_calls() -> None:
    ranks = 3
    rooms = [torch.zeros(2, ranks, TOKENS, SIZE).share_memory_() for _ in range(ranks)]
    flags = [torch.zeros(ranks, PROGRAMS, dtype=torch.int64).share_memory_() for _ in range(ranks)]
    context = mp.get_context("fork")  # they have the same memory then
    results = context.Queue()
    others = [
        context.Process(target=add_up, args=(rank, ranks, rooms, flags, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in others:
        process.start()
    found: dict[int, list[tuple[Tensor, Tensor | None]]] = {call: [] for call in range(len(CALLS))}
    for _ in range(ranks * len(CALLS)):
        _, call, whole, stream = results.get(timeout=WAIT_SECONDS)
        found[call].append((torch.tensor(whole), None if stream is None else torch.tensor(stream)))
    for process in others:
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0
    for call, n in enumerate(CALLS):
        parts = parts_of(call, n, ranks)
        expected = naive.one_shot_sum(parts), None
        if call % 2:
            stream = normal(-call - 1, n, SIZE)
            expected = naive.one_shot_sum_norm(stream, parts, normal(99, SIZE), EPS)
        (first, first_stream), *rest = found[call]
        torch.testing.assert_close(first, expected[0], rtol=2e-6, atol=2e-6)
        if first_stream is not None:
            torch.testing.assert_close(first_stream, expected[1], rtol=2e-6, atol=2e-6)
        for whole, stream in rest:
            assert torch.equal(whole, first)
            assert first_stream is None or torch.equal(stream, first_stream)
