"""Times the Triton kernels of a verify step on one Mamba2 layer, beside the bytes they must move.

    PYTHONPATH=python python benchmark/kernels/bench_tree_verify.py --output FILE.jsonl
    … --sweep CONFIGS.jsonl    # first find the best configurations

Launches are captured in a CUDA graph that goes round the buffers of several layers, more than the
L2 cache holds, so that every state comes from memory, as it does in a model. ``floor`` is the time
in which the device's own copy moves the same bytes, measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from measure import ROTATED_BYTES, Report, compile_all, graph_us
from torch import Tensor

from mamba_eagle.kernels.causal_conv.triton import ConvWeights, tree_conv
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout, pack_ancestors
from mamba_eagle.kernels.tree_verify.triton import Config, choose_config, tree_verify
from mamba_eagle.kernels.tree_verify.triton_fold import fold_journals

NANO_9B = Sizes(heads=128, head_dim=80, groups=8, state_size=128)
CONV_KERNEL = 4
JOURNAL = 16
ROWS = 32
LAYERS = 27  # of Nemotron-Nano-9B-v2 are Mamba2


class Mode(NamedTuple):
    nodes: int
    fold: bool | None  # what all requests' flags say; None: a step without flags


MODES = {
    "tree": Mode(16, None),
    "tree_fold": Mode(16, True),
    "tree_fold_unused": Mode(16, False),
    "decode": Mode(1, None),
    "decode_fold": Mode(1, True),
    "decode_fold_unused": Mode(1, False),
    "tree_8": Mode(8, None),
    "tree_8_fold": Mode(8, True),
    "tree_8_fold_unused": Mode(8, False),
}
GOALS_US = {
    "tree": {1: 6, 8: 22, 32: 72},
    "tree_fold": {1: 9, 8: 40, 32: 140},
    "decode": {1: 4, 8: 19, 32: 66},
}


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
            ancestors=pack_ancestors(ancestors)[..., 0],
            tail=path[:, -(CONV_KERNEL - 1) :],
            fold=None if mode.fold is None else torch.full((batch,), mode.fold),
        )
        parts = (part if part is None else part.contiguous().cuda() for part in step)
        self.step = TreeLayout(*parts)

    def verify(self, config: Config | None = None) -> list[Callable[[], object]]:
        def launch(layer: int) -> Tensor:
            args = (self.buffers[layer], self.C, self.D, self.state[layer])
            return tree_verify(*args, self.step, self.sizes, config)

        return [partial(launch, layer) for layer in range(len(self.state))]

    def conv(self, block: int | None = None, warps: int = 4) -> list[Callable[[], object]]:
        H = self.sizes.heads
        xbc = self.projected[:, H * self.sizes.head_dim : -H]

        def launch(layer: int) -> Tensor:
            args = (self.weights, self.conv_in[layer], self.buffers[layer])
            dt_raw = self.projected[:, -H:]
            return tree_conv(xbc, dt_raw, *args, self.step, self.sizes, block, warps)

        return [partial(launch, layer) for layer in range(len(self.state))]

    def norm(self) -> list[Callable[[], object]]:
        inner = self.sizes.heads * self.sizes.head_dim
        y = torch.randn(len(self.projected), inner, device="cuda").bfloat16()
        gate, weight = self.projected[:, :inner], y[0].clone()
        return [lambda: gated_norm(y, gate, weight, self.sizes.groups, 1e-5)]


def bytes_moved(batch: int, mode: Mode, sizes: Sizes = NANO_9B) -> int:
    """Each input once, each output once."""
    H, P, G, N = sizes
    T = mode.nodes
    state = H * P * N * 4 * (2 if mode.fold else 1)
    rows = (JOURNAL + T) * (2 * (H * P + G * N) + 8 * H)
    return batch * (state + rows + 2 * T * (G * N + H * P))


def measure_mode(
    found: Report, mode_name: str, batch: int, best: dict[tuple[str, int], Config]
) -> None:
    mode = MODES[mode_name]
    fields = {"mode": mode_name, "batch": batch, "nodes": mode.nodes, "rows": JOURNAL}
    inputs = Inputs(batch, mode)
    config = best.get((mode_name.removesuffix("_unused"), batch))
    working = bool(mode.fold)  # of two launches, the one that has requests
    usual = choose_config(batch, mode.nodes, JOURNAL, inputs.sizes, torch.bfloat16, working)
    verify = inputs.verify(config)
    found.add(
        f"verify {mode_name} {batch}",
        f"kernel_{mode_name}_us",
        graph_us(verify),
        bytes_moved(batch, mode),
        GOALS_US.get(mode_name, {}).get(batch),
        **fields,
        config=list(config or usual),
    )
    if mode_name not in ("tree", "decode"):
        return
    conv = inputs.conv()
    both = list(itertools.chain.from_iterable(zip(conv, verify)))
    others = {
        "conv": graph_us(conv),
        "norm": graph_us(inputs.norm()),
        "conv_and_verify": 2 * graph_us(both),
    }
    for name, us in others.items():
        found.add(f"{name} {mode_name} {batch}", f"kernel_{name}_us", us, **fields)


def measure_fold(found: Report, batch: int) -> None:
    """Journals of all layers, outside of a step."""
    H, P, G, N = NANO_9B
    row = H * P + G * N
    xB = torch.randn(LAYERS, batch, ROWS, row, device="cuda").bfloat16()
    dt = torch.rand(LAYERS, batch, ROWS, H, device="cuda") * 0.1
    state = torch.randn(LAYERS, batch, H, P, N, device="cuda")
    slots = torch.arange(batch, device="cuda")
    journal = torch.arange(JOURNAL, device="cuda").repeat(batch, 1)
    length = torch.full_like(slots, JOURNAL)
    args = (RowBuffers(xB, dt, -dt.cumsum(2)), state, slots, slots, journal, length, NANO_9B)
    found.add(
        f"fold of {LAYERS} layers {batch}",
        "kernel_fold_us",
        graph_us([partial(fold_journals, *args)]),
        LAYERS * batch * (2 * H * P * N * 4 + JOURNAL * (2 * row + 8 * H)),
        batch=batch,
        rows=JOURNAL,
        layers=LAYERS,
    )


def report(output: str | None, best: dict[tuple[str, int], Config]) -> None:
    found = Report(output)
    for batch in (1, 8, 32):
        measure_fold(found, batch)
    for mode_name, batch in itertools.product(MODES, (1, 8, 32)):
        measure_mode(found, mode_name, batch, best)


def candidates(batch: int, mode: str) -> list[Config]:
    found = [Config(64, 1, 4, 1, early=early) for early in (False, True)]
    found += [Config(64, 1, 4, 1, bulk=True), Config(32, 1, 2, 1)]
    if mode == "decode":
        shapes = ((64, 8), (64, 4), (32, 4), (16, 1))
        for (tile, warps), early in itertools.product(shapes, (False, True)):
            found.append(Config(tile, 1, warps, 1, vector=True, early=early))
    for tiles, bulk in itertools.product((2, 4, 5, 10), (False, True)):
        if tiles * 8 <= 5 * batch:
            found.append(Config(64, tiles, 4, 2, bulk))
    return found


def compile_share(share: list[tuple[str, Config]]) -> None:
    """In a process of its own: fills Triton's cache."""
    inputs = {}
    for mode_name, config in share:
        if mode_name not in inputs:
            inputs[mode_name] = Inputs(1, MODES[mode_name], layers=1)
        try:
            inputs[mode_name].verify(config)[0]()
        except Exception as error:
            print("compile", mode_name, tuple(config), repr(error)[:150])


def sweep(output: str | None, seconds: float) -> dict[tuple[str, int], Config]:
    start = time.monotonic()
    modes = ("tree", "decode", "tree_fold", "decode_fold", "tree_8", "tree_8_fold")
    jobs = [(mode_name, config) for mode_name in modes for config in candidates(32, mode_name)]
    compile_all(compile_share, jobs)
    print(f"compiled {len(jobs)} in {time.monotonic() - start:.0f} s")
    best = {}
    for mode_name, batch in itertools.product(modes, (32, 8, 1)):
        inputs, results = Inputs(batch, MODES[mode_name]), []
        for config in candidates(batch, mode_name):
            if time.monotonic() - start > seconds:
                print("out of time")
                break
            try:
                results.append((graph_us(inputs.verify(config), 7), config))
            except Exception as error:
                print(mode_name, batch, tuple(config), repr(error)[:100])
        if output:
            with open(output, "a") as file:
                for us, config in results:
                    line = {"mode": mode_name, "batch": batch, "us": us, "config": list(config)}
                    file.write(json.dumps(line) + "\n")
        results.sort(key=lambda result: result[0])
        if results:
            best[mode_name, batch] = results[0][1]
        shown = "  ".join(f"{us:.2f} {'/'.join(map(str, c))}" for us, c in results)
        print(f"{mode_name} {batch}: {shown}", flush=True)
        if "fold" not in mode_name:
            blocks = itertools.product((64, 128, 256, 512, 1024), (1, 2, 4, 8))
            if MODES[mode_name].nodes > 1:
                blocks = itertools.product((32, 64, 128, 256), (2, 4, 8))
            times = [(graph_us(inputs.conv(*pair), 5), *pair) for pair in blocks]
            print("   conv:", *(f"{us:.2f} {n}/{w}" for us, n, w in sorted(times)[:5]))
        del inputs
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", help="first find the best configurations; details to this file")
    parser.add_argument("--seconds", type=float, default=600, help="stop the sweep after this")
    args = parser.parse_args()
    report(args.output, sweep(args.sweep, args.seconds) if args.sweep else {})


if __name__ == "__main__":
    main()
