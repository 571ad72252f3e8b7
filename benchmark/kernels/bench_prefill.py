"""Times the prefill kernels of one Mamba2 layer: convolution and scan, for several batches.

    PYTHONPATH=python python -m benchmark.kernels.bench_prefill --output FILE.jsonl
    … --sweep    # first find the best configurations

Beside each time stands that in which the device's own copy moves the same bytes (each input once,
each output once, each state read and written once), and the rate of the products that are made,
split ones counted twice.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.lib.launches import ROTATED_BYTES, Launch, Report, compile_all, graph_us
from benchmark.lib.verify_inputs import CONV_KERNEL, NANO_9B
from mamba_eagle.kernels.causal_conv.triton import ConvWeights
from mamba_eagle.kernels.causal_conv.triton_prefill import ScanInputs, prefill_conv
from mamba_eagle.kernels.prefill_plan import CONV_TOKENS, PrefillPlan, Prompt, prefill_plan
from mamba_eagle.kernels.ssd.triton import Config, choose_config, scan
from mamba_eagle.kernels.tree_verify.layout import Sizes

GOALS_US = {"32x256": 600}  # of the scan: with 27 layers a twentieth of 0.26 s
BATCHES = {
    "32x256": [256] * 32,
    "8x256": [256] * 8,
    "1x256": [256],
    "1x8192": [8192],
    "mixed": [4000, 1500, 1200, 700, 400, 200, 100, 50, 30, 12],
}
CONFIGS = [
    Config(tile, chunk, warps, stages)
    for tile, chunk, warps, stages in (
        *itertools.product((64,), (64,), (4, 8), (2, 3)),
        *itertools.product((64, 128), (64, 128), (8,), (2,)),
        *itertools.product((64,), (32,), (4,), (2, 3, 4)),
        *itertools.product((16, 32), (64,), (4,), (2,)),
    )
]
CONV_BLOCKS = tuple(itertools.product((8, 16, 32, 64), (128, 256, 512), (2, 4, 8)))


class Inputs:
    """Prompts of one batch, and the buffers of ``layers`` layers that they go through."""

    def __init__(self, lengths: list[int], sizes: Sizes = NANO_9B, layers: int = 0) -> None:
        H, P, G, N = self.sizes = sizes
        self.lengths = lengths
        n, conv_dim = sum(lengths), H * P + 2 * G * N
        torch.manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device="cuda")

        layers = layers or max(2, math.ceil(ROTATED_BYTES / (2 * n * conv_dim)))
        self.A = -torch.rand(H, device="cuda") - 0.1
        self.D = normal(H, dtype=torch.float32)
        self.state = normal(layers, len(lengths), H, P, N, dtype=torch.float32)
        self.history = normal(layers, len(lengths), CONV_KERNEL - 1, conv_dim)
        self.projected = [normal(n, H * P + conv_dim + H) for _ in range(layers)]
        self.weights = ConvWeights(
            normal(CONV_KERNEL, conv_dim),
            normal(conv_dim),
            normal(H, dtype=torch.float32) - 4,
            self.A,
            (0.0, float("inf")),
        )

    def plan(self, block: int = CONV_TOKENS) -> PrefillPlan:
        """Each prompt goes on from a state of its own, which is overwritten."""
        prompts, first = [], 0
        for slot, length in enumerate(self.lengths):
            prompts.append(Prompt(first, length, slot, ((length, slot),)))
            first += length
        return prefill_plan(prompts, partial(torch.tensor, device="cuda"), block)

    def convolved(
        self, layer: int, plan: PrefillPlan, block: int = 256, warps: int = 4
    ) -> ScanInputs:
        H, P = self.sizes[:2]
        projected = self.projected[layer]
        xbc, dt_raw = projected[:, H * P : -H], projected[:, -H:]
        return prefill_conv(
            xbc, dt_raw, self.weights, self.history[layer], plan, self.sizes, block, warps
        )

    def conv(self, tokens: int = CONV_TOKENS, block: int = 256, warps: int = 4) -> list[Launch]:
        plan = self.plan(tokens)
        layers = range(len(self.state))
        return [partial(self.convolved, layer, plan, block, warps) for layer in layers]

    def scan(self, config: Config | None = None) -> list[Launch]:
        plan, launches = self.plan(), []
        for layer in range(len(self.state)):
            x, dt, B, C = self.convolved(layer, plan)
            args = (x, dt, self.A, B, C, self.D, self.state[layer], plan, config)
            launches.append(partial(scan, *args))
        return launches

    @property
    def conv_bytes(self) -> int:
        H, P, G, N = self.sizes
        return sum(self.lengths) * (4 * (H * P + 2 * G * N) + 6 * H)

    @property
    def scan_bytes(self) -> int:
        H, P, G, N = self.sizes
        states = len(self.lengths) * 2 * H * P * N * 4
        return sum(self.lengths) * (4 * H * P + 4 * G * N + 4 * H) + states

    def scan_flops(self, config: Config) -> float:
        """Of the tensor cores; channels that pad a tile are not counted."""
        H, P, _, N = self.sizes
        chunk, programs = config.chunk, math.ceil(P / config.tile)
        products = chunk * chunk * (programs * N + P) + 3 * chunk * P * N
        chunks = sum(math.ceil(length / chunk) for length in self.lengths)
        return 2.0 * products * chunks * H


class Best(NamedTuple):
    scan: Config
    conv: tuple[int, int, int]  # tokens, channels, warps


def compile_share(share: list[Config | tuple[int, int, int]]) -> None:
    """In a process of its own: fills Triton's cache."""
    inputs = Inputs([100], layers=1)
    for config in share:
        try:
            launches = inputs.scan(config) if isinstance(config, Config) else inputs.conv(*config)
            launches[0]()
        except Exception as error:
            print("compile", tuple(config), repr(error)[:150])


def best_of(inputs: Inputs) -> Best:
    scans, convs = [], []
    for config in CONFIGS:
        try:
            scans.append((graph_us(inputs.scan(config), 5), config))
        except Exception as error:
            print(tuple(config), repr(error)[:100])
    for blocks in CONV_BLOCKS:
        convs.append((graph_us(inputs.conv(*blocks), 5), blocks))
    for name, times in (("scan", scans), ("conv", convs)):
        shown = (f"{us:.1f} {'/'.join(map(str, config))}" for us, config in sorted(times)[:8])
        print("   ", name, *shown, flush=True)
    return Best(min(scans)[1], min(convs)[1])


def report(output: str | None, sweeping: bool) -> None:
    if sweeping:
        compile_all(compile_share, [*CONFIGS, *CONV_BLOCKS])
    found = Report(output)
    _, P, _, N = NANO_9B
    for name, lengths in BATCHES.items():
        inputs = Inputs(lengths)
        usual = Best(choose_config(P, N, torch.bfloat16), (CONV_TOKENS, 256, 4))
        best = best_of(inputs) if sweeping else usual
        fields = {"mode": name, "batch": len(lengths), "tokens": sum(lengths)}
        us = graph_us(inputs.scan(best.scan))
        found.add(
            f"scan {name}",
            "kernel_scan_us",
            us,
            inputs.scan_bytes,
            GOALS_US.get(name),
            f"{inputs.scan_flops(best.scan) / us / 1e6:.0f} TFLOP/s {tuple(best.scan)}",
            **fields,
            config=list(best.scan),
        )
        found.add(
            f"conv {name}",
            "kernel_prefill_conv_us",
            graph_us(inputs.conv(*best.conv)),
            inputs.conv_bytes,
            note=str(best.conv),
            **fields,
            config=list(best.conv),
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
