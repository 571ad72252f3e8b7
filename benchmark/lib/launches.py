"""For benchmarks of kernels: times of launches, the copy rate beside them, result lines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

from mamba_eagle.bench import facts, results

Launch = Callable[[], object]
Job = TypeVar("Job")

PRODUCTS = {  # weights [out, in] of Nemotron-Nano-9B-v2
    "mamba in": (22656, 4480),
    "mamba out": (4480, 10240),
    "MLP up": (15680, 4480),
    "MLP down": (4480, 15680),
    "qkv": (7168, 4480),
    "lm_head": (131072, 4480),
}
ROTATED_BYTES = 300e6  # read by all launches of a round; the L2 cache of an H100 holds 50e6


def graph_us(launches: Sequence[Launch], replays: int = 9) -> float:
    """Median time of a launch within a captured graph, microseconds."""
    for launch in launches[:2]:
        launch()
    rounds = math.ceil(24 / len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(launches)))
    return float(torch.tensor(times[2:]).median())


def compile_all(compile_share: Callable[[list[Job]], object], jobs: list[Job]) -> None:
    """Calls ``compile_share`` with an equal share of the jobs in one process per core, to fill
    Triton's cache."""
    workers = max(1, (os.cpu_count() or 1) - 1)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(compile_share, [jobs[i::workers] for i in range(workers)]))


class Report:
    """Prints a row for each measurement and appends it to a file as a result line."""

    def __init__(self, output: str | None) -> None:
        self.output = output
        self.common = facts.facts("cuda")
        self.copy = self.common["copy_tb_s"]
        print(f"{self.common['gpu']}, copy {self.copy:.2f} TB/s, torch {torch.__version__}")
        print(f"{'':26s}{'us':>9s}{'goal':>7s}{'floor':>8s}{'share':>7s}")

    def add(
        self,
        label: str,
        name: str,
        us: float,
        num_bytes: float | None = None,
        goal: float | None = None,
        note: str = "",
        **fields: object,
    ) -> None:
        """``floor`` is the time in which the device's own copy moves ``num_bytes``."""
        floor, share = "", ""
        if num_bytes is not None:
            least = num_bytes / self.copy / 1e6
            floor, share = f"{least:.1f}", f"{least / us:.0%}"
        wanted = "" if goal is None else str(goal)
        print(f"{label:26s}{us:9.2f}{wanted:>7s}{floor:>8s}{share:>7s}  {note}", flush=True)
        if self.output:
            line = {"name": name, **fields, "value": round(us, 2), **self.common}
            results.append(self.output, [line])
