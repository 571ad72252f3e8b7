"""Times the short kernels of a verify step, in rows of Nemotron-Nano-9B-v2, beside their bytes.

    PYTHONPATH=python python -m benchmark.kernels.bench_step_kernels --output FILE.jsonl
    … --sweep    # other configurations, too

Launches are captured in a CUDA graph. Inputs of up to 64 rows stay in the L2 cache, as in a step;
those of the convolution go round the buffers of several layers. A kernel that may start early
overlaps with the one before it, so these times are lower bounds: behind a product it takes 1 to 2
µs longer. 8 nodes per request: 8 rows are one request.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmark.lib.launches import Launch, Report, graph_us
from benchmark.lib.verify_inputs import NANO_9B, Inputs, Mode
from mamba_eagle.kernels.best_token.triton import best_of
from mamba_eagle.kernels.causal_conv import triton as conv
from mamba_eagle.kernels.float8.torch import Rounding
from mamba_eagle.kernels.gated_norm import triton as gated
from mamba_eagle.kernels.relu_squared.triton import relu_squared_
from mamba_eagle.kernels.rms_norm.triton import add_rms_norm_
from mamba_eagle.kernels.rotary.triton import rotate_
from mamba_eagle.kernels.top_log_probs.triton import top_log_probs

NODES, HIDDEN, MLP, VOCABULARY, EPS = 8, 4480, 15680, 131072, 1e-5
BATCHES = (1, 8, 32, 128)
CONVOLUTIONS = [(1, 512, 2), (1, 1024, 4), (2, 512, 2), (2, 1024, 4), (4, 1024, 4)]
NORMS = [(1, 1), (1, 2), (1, 4), (1, 8), (4, 4)]
ROUNDED_NORMS = [(1, 4), (1, 8), (1, 16)]
PARTS = [(256, 4096, 4), (256, 8192, 8), (128, 8192, 8), (512, 8192, 8)]  # the usual one first


class Work(NamedTuple):
    name: str
    launches: Callable[..., Sequence[Launch]]  # with a configuration, if it has several
    num_bytes: int  # each input and each output once
    configs: Sequence[Any] = ()


def works(batch: int) -> Iterator[Work]:
    n = batch * NODES
    inputs = Inputs(batch, Mode(NODES, None))
    H, P, G, N = NANO_9B
    inner, channels = H * P, H * P + 2 * G * N
    configs = [conv.Config(*config) for config in CONVOLUTIONS]
    history = batch * 3 * channels
    yield Work("conv", inputs.conv, 2 * (n * 3 * channels + history) + 12 * n * H, configs)

    def rows(size: int) -> torch.Tensor:
        return torch.randn(n, size, device="cuda").bfloat16()

    y, weight = rows(inner), rows(inner)[0].clone()
    norm = (y, inputs.projected[:, :inner], weight, G, EPS)
    yield Work(
        "gated norm",
        lambda config=None: [partial(gated.gated_norm, *norm, config=config)],
        6 * n * inner,
        [gated.Config(*config) for config in NORMS],
    )
    yield Work(
        "gated norm, float8",
        lambda config=None: [partial(gated.gated_norm, *norm, Rounding(), config=config)],
        5 * n * inner,
        [gated.Config(*config) for config in ROUNDED_NORMS],
    )
    stream, added = rows(HIDDEN), rows(HIDDEN)
    sums = partial(add_rms_norm_, stream, added, weight[:HIDDEN].clone(), EPS)
    yield Work("sum, norm", lambda: [sums], 8 * n * HIDDEN)
    up = rows(MLP)
    yield Work("relu squared", lambda: [partial(relu_squared_, up)], 4 * n * MLP)
    heads = rows(40 * 128).view(n, 40, 128)
    angles = torch.rand(n, 1, 64, device="cuda")
    norms = (weight[:128].clone(), weight[:128].clone(), EPS)
    turned = partial(rotate_, heads[:, :24], angles, angles, heads[:, 24:32], norms)
    yield Work("heads normed, turned", lambda: [turned], 4 * n * 32 * 128)
    logits = rows(VOCABULARY)

    def best(config: tuple[int, int, int] = PARTS[0]) -> list[Launch]:
        return [partial(best_of, logits, *config)]

    def top(config: tuple[int, int, int] = PARTS[0]) -> list[Launch]:
        return [partial(top_log_probs, logits, 3, *config)]

    yield Work("best token", best, 2 * n * VOCABULARY, PARTS)
    yield Work("best 3 tokens", top, 2 * n * VOCABULARY, PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", action="store_true", help="print other configurations, too")
    args = parser.parse_args()
    found = Report(args.output)
    for batch in BATCHES:
        for name, launches, num_bytes, configs in works(batch):
            us = graph_us(launches())
            fields = {"kernel": name, "batch": batch, "nodes": NODES}
            found.add(f"{name} {batch * NODES}", "kernel_short_us", us, num_bytes, **fields)
            if args.sweep:
                times = [(graph_us(launches(config), 5), config) for config in configs]
                shown = (f"{us:.2f} {'/'.join(map(str, config))}" for us, config in sorted(times))
                print("    ", "  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
