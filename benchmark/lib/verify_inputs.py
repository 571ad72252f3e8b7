"""Inputs of the verify kernels of one Mamba2 layer, at the sizes of Nemotron-Nano-9B-v2."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.lib.launches import ROTATED_BYTES, Launch
from mamba_eagle.kernels.causal_conv.triton import Config as ConvConfig
from mamba_eagle.kernels.causal_conv.triton import ConvWeights, tree_conv
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_verify import gluon
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.tree_verify.triton import Config, tree_verify
from mamba_eagle.kernels.tree_verify.triton_snapshot import (
    SnapshotConfig,
    commit_snapshots,
    snapshot_verify,
)

NANO_9B = Sizes(heads=128, head_dim=80, groups=8, state_size=128)
CONV_KERNEL = 4
JOURNAL = 16
ROWS = 32


class Mode(NamedTuple):
    nodes: int
    fold: float | None  # share of the requests that fold; None: a step without flags


class Inputs:
    """A step of ``batch`` requests, and the buffers of ``layers`` layers that it goes through."""

    def __init__(
        self,
        batch: int,
        mode: Mode,
        sizes: Sizes = NANO_9B,
        layers: int = 0,
        journal: int = JOURNAL,
        rows: int = ROWS,
    ) -> None:
        H, P, G, N = self.sizes = sizes
        T, row = mode.nodes, H * P + G * N
        torch.manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device="cuda")

        layers = layers or max(4, math.ceil(ROTATED_BYTES / (batch * H * P * N * 4)))
        self.A = -torch.rand(H, device="cuda") - 0.1
        self.D = normal(H, dtype=torch.float32)
        self.state = normal(layers, batch, H, P, N, dtype=torch.float32)
        dt = torch.rand(layers, batch, rows, H, device="cuda") * 0.1
        per_layer = (normal(layers, batch, rows, row), dt, (dt * self.A).cumsum(2))
        self.buffers = [RowBuffers(*parts) for parts in zip(*per_layer)]
        self.conv_in = normal(layers, batch, CONV_KERNEL - 1 + rows, row + G * N)
        self.projected = normal(batch * T, H * P + row + G * N + H)
        self.C = normal(batch, T, G * N)
        self.weights = ConvWeights(
            normal(CONV_KERNEL, row + G * N),
            normal(row + G * N),
            normal(H, dtype=torch.float32),
            self.A,
            (0.0, float("inf")),
        )
        parents = torch.tensor([[0] + [(i - 1) // 3 for i in range(1, T)]] * batch)
        ancestors = torch.eye(T, dtype=torch.bool).repeat(batch, 1, 1)
        for i in range(1, T):
            ancestors[:, i] |= ancestors[:, int(parents[0, i])]
        order = torch.stack([torch.randperm(rows) for _ in range(batch)])
        history = torch.arange(CONV_KERNEL - 1).expand(batch, -1)
        path = torch.cat([history, order[:, :journal] + CONV_KERNEL - 1], dim=1)
        step = TreeLayout(
            slots=torch.arange(batch),
            state_slots=torch.randperm(batch),
            journal=order[:, :journal],
            journal_len=torch.full((batch,), journal),
            rows=order[:, journal : journal + T],
            parents=parents,
            ancestors=pack_paths(ancestors)[..., 0],
            tail=path[:, -(CONV_KERNEL - 1) :],
            fold=None if mode.fold is None else torch.arange(batch) < round(batch * mode.fold),
        )
        parts = (part if part is None else part.contiguous().cuda() for part in step)
        self.step = TreeLayout._make(parts)

    def verify(self, config: Config | None = None) -> list[Launch]:
        """config: of triton.py's kernel; None: what a server launches."""

        def launch(layer: int) -> Tensor:
            args = (self.buffers[layer], self.C, self.D, self.state[layer], self.step, self.sizes)
            return tree_verify(*args, config) if config else gluon.tree_verify(*args)

        return [partial(launch, layer) for layer in range(len(self.state))]

    def conv(self, config: ConvConfig | None = None) -> list[Launch]:
        H = self.sizes.heads
        xbc = self.projected[:, H * self.sizes.head_dim : -H]

        def launch(layer: int) -> Tensor:
            args = (self.weights, self.conv_in[layer], self.buffers[layer])
            dt_raw = self.projected[:, -H:]
            return tree_conv(xbc, dt_raw, *args, self.step, self.sizes, config)

        return [partial(launch, layer) for layer in range(len(self.state))]

    def norm(self) -> list[Launch]:
        inner = self.sizes.heads * self.sizes.head_dim
        y = torch.randn(len(self.projected), inner, device="cuda").bfloat16()
        gate, weight = self.projected[:, :inner], y[0].clone()
        return [lambda: gated_norm(y, gate, weight, self.sizes.groups, 1e-5)]


def bytes_moved(batch: int, mode: Mode, sizes: Sizes = NANO_9B) -> int:
    """Each input once, each output once."""
    H, P, G, N = sizes
    T = mode.nodes
    state = H * P * N * 4 * (1 + (mode.fold or 0))
    rows = (JOURNAL + T) * (2 * (H * P + G * N) + 8 * H)
    return int(batch * (state + rows + 2 * T * (G * N + H * P)))


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
