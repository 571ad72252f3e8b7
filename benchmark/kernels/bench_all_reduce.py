"""Microseconds of the exchanges of a split model (docs/design/parallel.md), one process per rank.

    python -m benchmark.kernels.bench_all_reduce --ranks 2 --hidden 4480

On GPUs each operation is captured 56 times in a CUDA graph, as a step of 56 blocks has it; on a CPU
it is called as it is. Prints one line per size; fails if a sum is wrong or differs between ranks.
With --all-reduce on GPUs it makes the table of that flag instead, and prints what each way takes.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.devices import choose_backend
from mamba_eagle.message.ranks import RANK_ENVIRONMENT
from mamba_eagle.parallel.distributed import FileMeeting, ProcessGroup, meet
from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.runner.sums import sums_for

BLOCKS, ROUNDS = 56, 20
ROWS = (1, 8, 32, 64, 256, 1024)


def graphed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Microseconds per call in a graph of BLOCKS calls, and the last result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(BLOCKS):
            out = work()
        graph.capture_end()
        for _ in range(3):
            graph.replay()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(ROUNDS):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e3 / (ROUNDS * BLOCKS), out


def called(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    out = work()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        out = work()
    return (time.perf_counter() - began) * 1e6 / ROUNDS, out


def measure(rank: int, args: argparse.Namespace, file: str) -> None:
    os.environ.update(RANK_ENVIRONMENT)
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    meet(Shard(rank, args.ranks), device, FileMeeting(file))
    group = ProcessGroup(Shard(rank, args.ranks), device)
    if args.all_reduce:
        show_table(group, args)
        group.close()
        return
    timed = graphed if on_gpu else called
    for rows in ROWS:
        microseconds, whole = timed(sums(group, rows, args.hidden))
        same = group.gather(whole.view(torch.uint8))  # NCCL has no int16
        assert torch.equal(same, same[:1].expand_as(same)), "the ranks have different bits"
        if rank == 0:
            size = whole.nbytes / 1024
            print(f"sum {rows:5} rows {size:8.0f} KiB {microseconds:9.1f} us", flush=True)
    for nodes in (1, 8, 256):
        microseconds, _ = timed(best_tokens(group, nodes, args.vocab))
        if rank == 0:
            print(f"best token of {nodes:4} nodes {microseconds:15.1f} us", flush=True)
    group.close()


def show_table(group: Group, args: argparse.Namespace) -> None:
    """As a runner makes it, for the steps of up to 256 tokens."""
    form = "%(relativeCreated)6.0f ms  %(message)s"
    level = logging.INFO if group.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=form)
    config = EngineConfig(
        all_reduce=args.all_reduce,
        tp_size=args.ranks,
        speculative_algorithm="STANDALONE",
        speculative_num_draft_tokens=8,
    )
    sums_for(config, group, choose_backend(group.device, torch.bfloat16), args.hidden)


def sums(group: Group, rows: int, hidden: int) -> Callable[[], Tensor]:
    """Sums of a [rows, hidden] part of each rank, checked once."""
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    own = torch.full((rows, hidden), float(group.rank + 1), dtype=dtype, device=group.device)
    expected = group.size * (group.size + 1) / 2
    assert bool((group.sum(own.clone()) == expected).all()), "a wrong sum"
    part = own.clone()

    def work() -> Tensor:
        return group.sum(part.copy_(own))

    return work


def best_tokens(group: Group, nodes: int, vocab: int) -> Callable[[], Tensor]:
    columns = Columns(group, vocab)
    generator = torch.Generator(group.device).manual_seed(1)
    logits = torch.randn(nodes, vocab, device=group.device, generator=generator)
    own, width = columns.of(logits).contiguous(), max(columns.sizes)
    backend = choose_backend(group.device, torch.float32)

    def work() -> Tensor:
        keys = backend.best_keys(own, columns.span.begin, width, None)
        return backend.best_tokens(group.max(keys))

    assert torch.equal(work(), logits.argmax(-1)), "a wrong token"
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4480)
    parser.add_argument("--vocab", type=int, default=131072)
    ways = ("nccl", "symmetric", "auto")
    parser.add_argument("--all-reduce", choices=ways, help="which table to make")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(args, os.path.join(folder, "ranks")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
