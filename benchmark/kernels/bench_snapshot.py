"""Times the node-snapshot scheme's kernels on one Mamba2 layer, beside the bytes they must move.

    PYTHONPATH=python python -m benchmark.kernels.bench_snapshot --output FILE.jsonl --sweep

It is what rows and folds are compared with, so it gets the same inputs as bench_tree_verify.py, and
its ``goal`` is what SGLang's kernel took for as many nodes on an H100. ``floor`` counts the state
once and each node's state once; nodes that do not follow their parent read one more.
"""

from __future__ import annotations

import argparse
import itertools

from benchmark.lib.launches import Report, graph_us
from benchmark.lib.verify_inputs import SnapshotInputs
from mamba_eagle.kernels.tree_verify.triton_snapshot import SnapshotConfig

SGLANG_US = {8: {1: 29, 8: 161, 32: 676}, 16: {1: 55, 8: 309, 32: 1330}}
CONFIGS = [
    SnapshotConfig(tile, warps)
    for tile, warps in ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))
]


def report(output: str | None, sweeping: bool) -> None:
    found = Report(output)
    for nodes, batch in itertools.product(SGLANG_US, (1, 8, 32)):
        inputs = SnapshotInputs(batch, nodes)
        config = None
        if sweeping:
            times = [(graph_us(inputs.snapshot(config), 5), config) for config in CONFIGS]
            config = min(times)[1]
            print("   ", *(f"{us:.1f} {c.tile}/{c.warps}" for us, c in sorted(times)))
        fields = {"mode": "snapshot", "batch": batch, "nodes": nodes, "rows": 0}
        found.add(
            f"snapshot {nodes} nodes {batch}",
            "kernel_snapshot_us",
            graph_us(inputs.snapshot(config)),
            inputs.num_bytes,
            SGLANG_US[nodes][batch],
            **fields,
            config=None if config is None else list(config),
        )
        layers = len(inputs.state)
        found.add(
            f"snapshot copy, per layer {batch}",
            "kernel_snapshot_copy_us",
            graph_us(inputs.commit()) / layers,
            2 * inputs.state_bytes,
            **fields,
        )
        del inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", action="store_true", help="first find the best configurations")
    args = parser.parse_args()
    report(args.output, args.sweep)


if __name__ == "__main__":
    main()
