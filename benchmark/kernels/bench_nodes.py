"""Times the verify kernels of both schemes on one Mamba2 layer against the number of tree nodes.

    PYTHONPATH=python python -m benchmark.kernels.bench_nodes --output FILE.jsonl

Rows and folds (16 journal rows; without a fold, and with one of every request) read the state once,
whatever the tree; the other scheme writes one state per node. Measured as in bench_tree_verify.py
and bench_snapshot.py.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

import torch

from benchmark.lib.launches import Report, compile_all, graph_us
from benchmark.lib.verify_inputs import (
    JOURNAL,
    NANO_9B,
    Inputs,
    Mode,
    SnapshotInputs,
    bytes_moved,
)
from mamba_eagle.kernels.tree_verify.triton import choose_config

MAX_SNAPSHOT_BYTES = 30e9  # of all node states; two layers at least are gone round


class Job(NamedTuple):
    batch: int
    nodes: int

    @property
    def modes(self) -> list[Mode]:
        return [Mode(self.nodes, None), Mode(self.nodes, True)]


def compile_share(share: list[Job]) -> None:
    """In a process of its own: fills Triton's cache, with small inputs."""
    for job in share:
        SnapshotInputs(1, job.nodes).snapshot()[0]()
        for mode in job.modes:
            config = choose_config(job.batch, job.nodes, JOURNAL, NANO_9B)
            Inputs(1, mode, layers=1, rows=JOURNAL + job.nodes).verify(config)[0]()


def measure_rows(found: Report, job: Job) -> None:
    for mode, suffix in zip(job.modes, ("", "_fold")):
        kind = ("decode" if job.nodes == 1 else "tree") + suffix
        fields = {"mode": kind, "batch": job.batch, "nodes": job.nodes, "rows": JOURNAL}
        us = graph_us(Inputs(job.batch, mode, rows=JOURNAL + job.nodes).verify())
        label = f"{kind} {job.nodes} nodes {job.batch}"
        found.add(label, f"kernel_{kind}_us", us, bytes_moved(job.batch, mode), **fields)


def measure_snapshot(found: Report, job: Job) -> None:
    batch, nodes = job
    inputs = SnapshotInputs(batch, nodes)
    fields = {"mode": "snapshot", "batch": batch, "nodes": nodes, "rows": 0}
    us = graph_us(inputs.snapshot())
    found.add(
        f"snapshot {nodes} nodes {batch}", "kernel_snapshot_us", us, inputs.num_bytes, **fields
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--output", help="append JSON lines to this file")
    args = parser.parse_args()
    found = Report(args.output)
    jobs = [Job(*pair) for pair in itertools.product(args.batch_size, args.nodes)]
    compile_all(compile_share, jobs)
    state_bytes = 4 * NANO_9B.heads * NANO_9B.head_dim * NANO_9B.state_size
    for job in jobs:
        measure_rows(found, job)
        if 2 * job.batch * job.nodes * state_bytes <= MAX_SNAPSHOT_BYTES:
            measure_snapshot(found, job)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
