"""Times the node-snapshot scheme's kernels on one Mamba2 layer, beside the bytes they must move.

    PYTHONPATH=python python benchmark/kernels/bench_snapshot.py --output FILE.jsonl --sweep

It is what rows and folds are compared with, so it gets the same inputs as bench_tree_verify.py, and
its ``goal`` is what SGLang's kernel took for as many nodes on an H100. ``floor`` counts the state
once and each node's state once; nodes that do not follow their parent read one more.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial

import torch
from bench_tree_verify import NANO_9B, Inputs, Mode
from measure import ROTATED_BYTES, Launch, Report, graph_us
from torch import Tensor

from mamba_eagle.kernels.tree_verify.triton_snapshot import (
    SnapshotConfig,
    commit_snapshots,
    snapshot_verify,
)

SGLANG_US = {8: {1: 29, 8: 161, 32: 676}, 16: {1: 55, 8: 309, 32: 1330}}
CONFIGS = [
    SnapshotConfig(tile, warps)
    for tile, warps in ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))
]


class SnapshotInputs(Inputs):
    """A tree without a journal, and a state for each node and layer."""

    def __init__(self, batch: int, nodes: int) -> None:
        state_bytes = batch * math.prod((NANO_9B.heads, NANO_9B.head_dim, NANO_9B.state_size)) * 4
        layers = max(2, math.ceil(ROTATED_BYTES / (state_bytes * nodes)))
        super().__init__(batch, Mode(nodes, None), layers=layers, journal=0, rows=nodes)
        self.node_states = self.state.new_empty(layers, batch, nodes, *self.state.shape[2:])
        self.nodes, self.state_bytes = nodes, state_bytes

    def snapshot(self, config: SnapshotConfig | None = None) -> list[Launch]:
        def launch(layer: int) -> Tensor:
            return snapshot_verify(
                self.buffers[layer],
                self.C,
                self.A,
                self.D,
                self.state[layer],
                self.node_states[layer],
                self.step,
                self.sizes,
                config,
            )

        return [partial(launch, layer) for layer in range(len(self.state))]

    def commit(self) -> list[Launch]:
        """All layers in one launch."""
        count = torch.ones_like(self.step.slots)
        at = (self.step.slots, self.step.state_slots, self.step.rows[:, -1].contiguous(), count)
        return [lambda: commit_snapshots(self.node_states, self.state, *at)]

    @property
    def num_bytes(self) -> int:
        H, P, G, N = self.sizes
        rows = self.nodes * (2 * (H * P + G * N) + 4 * H + 2 * (G * N + H * P))
        return (1 + self.nodes) * self.state_bytes + len(self.step.slots) * rows


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
            f"snapshot copy, a layer {batch}",
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
