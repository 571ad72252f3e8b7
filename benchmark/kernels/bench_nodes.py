"""Times the verify kernels of both schemes on one Mamba2 layer against the number of tree nodes.

    PYTHONPATH=python python benchmark/kernels/bench_nodes.py --output FILE.jsonl

Rows and folds (16 chain rows; without a fold, and with one of every request) read the state once,
whatever the tree; a state a node is written as often as there are nodes. Measured as
bench_tree_verify.py and bench_snapshot.py do.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from bench_snapshot import SnapshotInputs
from bench_tree_verify import CHAIN, NANO_9B, Inputs, Mode, bytes_moved
from measure import Report, graph_us

MOST_SNAPSHOT_BYTES = 30e9  # of all node states; two layers at least are gone round


def measure_rows(found: Report, batch: int, nodes: int) -> None:
    for fold, suffix in ((None, ""), (True, "_fold")):
        mode = Mode(nodes, fold)
        kind = ("decode" if nodes == 1 else "tree") + suffix
        fields = {"mode": kind, "batch": batch, "nodes": nodes, "rows": CHAIN}
        us = graph_us(Inputs(batch, mode, rows=CHAIN + nodes).verify())
        label = f"{kind} {nodes} nodes {batch}"
        found.add(label, f"kernel_{kind}_us", us, bytes_moved(batch, mode), **fields)


def measure_snapshot(found: Report, batch: int, nodes: int) -> None:
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
    for batch, nodes in itertools.product(args.batch_size, args.nodes):
        measure_rows(found, batch, nodes)
        state_bytes = 4 * NANO_9B.heads * NANO_9B.head_dim * NANO_9B.state_size
        if 2 * batch * nodes * state_bytes <= MOST_SNAPSHOT_BYTES:
            measure_snapshot(found, batch, nodes)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
