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
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mamba_eagle.eval.machine import commit
from mamba_eagle.kernels.causal_conv.triton import ConvWeights, tree_conv
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.tree_verify.triton import (
    Config,
    RowBuffers,
    Sizes,
    TreeStep,
    ancestor_bits,
    choose_config,
    tree_verify,
)

NANO_9B = Sizes(heads=128, head_dim=80, groups=8, state_size=128)
CONV_KERNEL = 4
CHAIN = 16
ROWS = 32
ROTATED_BYTES = 300e6  # of states; the L2 cache of an H100 holds 50e6


class Mode(NamedTuple):
    nodes: int
    fold: bool | None  # what all requests' flags say; None: a step without flags


MODES = {
    "tree": Mode(16, None),
    "tree_fold": Mode(16, True),
    "tree_fold_unused": Mode(16, False),
    "decode": Mode(1, None),
    "decode_fold": Mode(1, True),
}
GOALS_US = {
    "tree": {1: 6, 8: 22, 32: 72},
    "tree_fold": {1: 9, 8: 40, 32: 140},
    "decode": {1: 4, 8: 19, 32: 66},
}


class Inputs:
    """A step of ``batch`` requests, and the buffers of ``layers`` layers that it goes through."""

    def __init__(self, batch: int, mode: Mode, sizes: Sizes = NANO_9B, layers: int = 0) -> None:
        H, P, G, N = self.sizes = sizes
        T, row = mode.nodes, H * P + G * N
        torch.manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device="cuda")

        layers = layers or max(4, math.ceil(ROTATED_BYTES / (batch * H * P * N * 4)))
        self.A = -torch.rand(H, device="cuda") - 0.1
        self.D = normal(H, dtype=torch.float32)
        self.state = normal(layers, batch, H, P, N, dtype=torch.float32)
        dt = torch.rand(layers, batch, ROWS, H, device="cuda") * 0.1
        per_layer = (normal(layers, batch, ROWS, row), dt, (dt * self.A).cumsum(2))
        self.buffers = [RowBuffers(*parts) for parts in zip(*per_layer)]
        self.conv_in = normal(layers, batch, CONV_KERNEL - 1 + ROWS, row + G * N)
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
        order = torch.stack([torch.randperm(ROWS) for _ in range(batch)])
        step = TreeStep(
            slots=torch.arange(batch),
            checkpoints=torch.randperm(batch),
            chain=order[:, :CHAIN],
            chain_len=torch.full((batch,), CHAIN),
            rows=order[:, CHAIN : CHAIN + T],
            parents=parents,
            ancestors=ancestor_bits(ancestors),
            tail=order[:, CHAIN - CONV_KERNEL + 1 : CHAIN] + CONV_KERNEL - 1,
            fold=None if mode.fold is None else torch.full((batch,), mode.fold),
        )
        parts = (part if part is None else part.contiguous().cuda() for part in step)
        self.step = TreeStep(*parts)

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
    rows = (CHAIN + T) * (2 * (H * P + G * N) + 8 * H)
    return batch * (state + rows + 2 * T * (G * N + H * P))


def graph_us(launches: list[Callable[[], object]], replays: int = 9) -> float:
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


def bandwidth_tb_s(launch: Callable[[], object], num_bytes: int) -> float:
    """Not in a graph: there a copy may be given to a slower engine."""
    return num_bytes / triton.testing.do_bench(launch, return_mode="median") / 1e9


def copy_tb_s() -> float:
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    print(f"sum reads {bandwidth_tb_s(source.sum, source.nbytes):.2f} TB/s")
    return bandwidth_tb_s(lambda: target.copy_(source), 2 * source.nbytes)


def report(output: str | None, best: dict[tuple[str, int], Config]) -> None:
    copy = copy_tb_s()
    common = {
        "gpu": torch.cuda.get_device_name(),
        "copy_tb_s": round(copy, 3),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("COMMIT") or commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    print(f"{common['gpu']}, copy {copy:.2f} TB/s, torch {torch.__version__}")
    print(f"{'':18s}{'batch':>6s}{'us':>9s}{'goal':>7s}{'floor':>8s}{'share':>7s}")
    lines = []

    def add(name: str, mode_name: str, batch: int, us: float, config: Config | None = None) -> None:
        mode = MODES[mode_name]
        goal = GOALS_US.get(mode_name, {}).get(batch, "") if name == "verify" else ""
        floor, share = "", ""
        if name == "verify":
            least = bytes_moved(batch, mode) / copy / 1e6
            floor, share = f"{least:.1f}", f"{least / us:.0%}"
        print(f"{name + ' ' + mode_name:18s}{batch:6d}{us:9.2f}{goal!s:>7s}{floor:>8s}{share:>7s}")
        key = f"kernel_{mode_name}_us" if name == "verify" else f"kernel_{name}_us"
        line = {"name": key, "mode": mode_name, "batch": batch, "nodes": mode.nodes}
        line |= {"rows": CHAIN, "value": round(us, 2)} | common
        lines.append(line if config is None else line | {"config": list(config)})

    for mode_name, batch in itertools.product(MODES, (1, 8, 32)):
        inputs = Inputs(batch, MODES[mode_name])
        mode = MODES[mode_name]
        fold = mode.fold is not None
        usual = choose_config(batch, mode.nodes, CHAIN, inputs.sizes, torch.bfloat16, fold)
        config = best.get((mode_name.removesuffix("_unused"), batch), usual)
        verify = inputs.verify(config)
        add("verify", mode_name, batch, graph_us(verify), config)
        if mode_name in ("tree", "decode"):
            conv = inputs.conv()
            add("conv", mode_name, batch, graph_us(conv))
            add("norm", mode_name, batch, graph_us(inputs.norm()))
            both = list(itertools.chain.from_iterable(zip(conv, verify)))
            add("conv_and_verify", mode_name, batch, 2 * graph_us(both))
        del inputs, verify
    if output:
        with open(output, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def candidates(batch: int, mode: str) -> list[Config]:
    found = [Config(64, 1, 4, 1), Config(64, 1, 4, 1, bulk=True), Config(32, 1, 2, 1)]
    if mode == "decode":
        shapes = ((64, 8), (64, 4), (32, 4), (16, 1))
        found += [Config(tile, 1, warps, 1, vector=True) for tile, warps in shapes]
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
    modes = ("tree", "decode", "tree_fold", "decode_fold")
    jobs = [(mode_name, config) for mode_name in modes for config in candidates(32, mode_name)]
    workers = max(1, (os.cpu_count() or 1) - 1)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(compile_share, [jobs[i::workers] for i in range(workers)]))
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
