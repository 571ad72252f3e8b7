"""Times the verify kernel of delta rules on one layer, against its bytes and a state per node.

    PYTHONPATH=python python -m benchmark.kernels.bench_delta_rule --output FILE.jsonl

``floor`` is the time in which the device's copy moves the state, the journal's rows and the nodes'
once. ``goal`` is a fifth of what merely writing a state per node takes, which is measured in the
same run. Every launch has a layer of its own, so that no state is in the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial

import torch

from benchmark.lib.launches import ROTATED_BYTES, Launch, Report, graph_us
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.delta_rule.triton import Config, tree_verify
from mamba_eagle.kernels.delta_rule.triton_fold import fold_journals
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_verify.layout import Folds, Sizes, TreeLayout
from mamba_eagle.layers.delta_rule import L2_EPS

GEOMETRIES = {"27B": Sizes(48, 128, 16, 128), "35B-A3B": Sizes(32, 128, 16, 128)}
SWEEP = [Config(*each) for each in ((16, 2), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))]
NODES, BATCHES, JOURNAL = (1, 2, 4, 8, 16, 32, 64), (1, 8, 32), 16


class Inputs:
    """Of enough layers: random, with full journals and trees that are chains."""

    def __init__(self, sizes: Sizes, batch: int, nodes: int, channels: bool) -> None:
        torch.manual_seed(0)
        H, P, G, N = self.sizes = sizes
        b, T, M = self.batch, self.nodes, _ = batch, nodes, JOURNAL
        self.state_bytes = b * H * P * N * 4
        layers = min(16, max(2, math.ceil(ROTATED_BYTES / self.state_bytes)))
        gate_size = (H * N if channels else H) + H
        dtype, device = torch.bfloat16, torch.device("cuda")

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        gates = -torch.rand(layers, b, M + T, gate_size, device=device)
        gates[..., -H:].abs_()  # beta
        self.rows = DeltaRows(
            gates, normal(layers, b, M + T, G * N).to(dtype), normal(layers, b, M + T, H * P)
        )
        self.gates = gates[0, :, :T].reshape(b * T, -1).contiguous()
        self.convolved = normal(b, T, 2 * G * N + H * P).to(dtype)
        self.state = normal(layers, b, H, P, N)
        numbers = torch.arange(M + T, device=device).expand(b, -1)
        requests = torch.arange(b, device=device)
        chain = torch.ones(b, T, T, dtype=torch.bool, device=device).tril()
        self.step = TreeLayout(
            slots=requests,
            state_slots=requests,
            journal=numbers[:, :M].contiguous(),
            journal_len=torch.full((b,), M, device=device),
            rows=numbers[:, M:].contiguous(),
            parents=(numbers[:, :T] - 1).clamp(min=0).contiguous(),
            ancestors=pack_paths(chain)[..., 0].contiguous(),
            tail=numbers[:, :3].contiguous(),
        )

    @property
    def num_bytes(self) -> int:
        row = sum(part[0, 0, 0].nbytes for part in self.rows)
        return self.state_bytes + self.batch * (JOURNAL + self.nodes) * row

    def verify(self, config: Config | None) -> list[Launch]:
        shared = (self.gates, self.convolved)
        return [
            partial(
                tree_verify,
                rows_of(self.rows, i),
                *shared,
                state,
                self.step,
                self.sizes,
                L2_EPS,
                config,
            )
            for i, state in enumerate(self.state)
        ]

    def fold(self) -> list[Launch]:
        folds = Folds(*self.step[:4])
        return [partial(fold_journals, self.rows, self.state, folds, self.sizes, L2_EPS)]

    def states_of_nodes(self) -> list[Launch]:
        """Writing them, and nothing else."""
        written = torch.empty(self.nodes, *self.state.shape[1:], device="cuda")
        return [partial(written.copy_, state) for state in self.state]


def rows_of(rows: DeltaRows, layer: int) -> DeltaRows:
    return DeltaRows(*(part[layer] for part in rows))


def report(output: str | None, configs: list[Config | None]) -> None:
    found = Report(output)
    cases = itertools.product(GEOMETRIES, (False, True), NODES, BATCHES)
    for geometry, channels, nodes, batch in cases:
        inputs = Inputs(GEOMETRIES[geometry], batch, nodes, channels)
        states_us = graph_us(inputs.states_of_nodes())
        kind = "channel" if channels else "head"
        fields = {"geometry": geometry, "decay": kind, "nodes": nodes, "batch": batch}
        for config in configs:
            us = graph_us(inputs.verify(config))
            label = f"{geometry} {kind} {nodes} nodes {batch}" + (
                f" /{config.tile}, {config.warps}" if config else ""
            )
            note = f"a state per node: {states_us / us:.1f} times"
            goal = round(states_us / 5, 1)
            name = "kernel_delta_verify_us"
            found.add(label, name, us, inputs.num_bytes, goal, note, **fields, config=config)
        if nodes == 1:
            layers = len(inputs.state)
            us = graph_us(inputs.fold()) / layers
            moved = inputs.num_bytes + inputs.state_bytes
            found.add(
                f"{geometry} {kind} fold {batch}", "kernel_delta_fold_us", us, moved, **fields
            )
        del inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", action="store_true", help="other ways to divide the work")
    args = parser.parse_args()
    report(args.output, SWEEP if args.sweep else [None])


if __name__ == "__main__":
    main()
