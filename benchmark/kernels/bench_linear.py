"""Times products with weights of 16 bits for few tokens, beside cuBLAS and the bytes of the weight.

    PYTHONPATH=python python -m benchmark.kernels.bench_linear --output FILE.jsonl
    … --sweep       # other configurations of the Triton kernel

The shapes are those of a 9B model, and narrower ones. Launches go round copies of the weight,
which together do not fit into the L2 cache. ``unsplit``: cuBLASLt when it may not divide the
columns. ``rows``: the kernel for few rows. Rows of all other forms that divide no columns are
compared bit by bit; the script fails where they differ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from benchmark.lib.launches import PRODUCTS, ROTATED_BYTES, Report, graph_us
from mamba_eagle.kernels.linear import triton_rows
from mamba_eagle.kernels.linear.triton import Config, linear

NARROW = {
    "gates": (96, 5120),
    "router": (128, 2688),
    "short": (1024, 4096),
    "30B out": (2688, 4096),
}
TOKENS = (1, 8, 32, 64, 128, 256)
SWEEP = [
    Config(rows, 0, columns, warps, stages)
    for rows, columns, warps, stages in itertools.product(
        (16, 32, 64, 128), (128, 256), (4, 8), (4, 5, 6, 8)
    )
    if (warps == 8) == (rows == 128)
]
SHARED = 220_000  # bytes that a program may have


@contextmanager
def unsplit() -> Iterator[None]:
    """cuBLASLt, and no sums of parts."""
    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    yield
    settings.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.preferred_blas_library(before)


def configs(tokens: int, sweep: bool) -> list[Config | None]:
    if not sweep:
        return [None]
    padded = max(16, min(128, 1 << (tokens - 1).bit_length()))
    found = [config._replace(tokens=padded) for config in SWEEP]
    return [
        config
        for config in found
        if (config.rows + padded) * config.columns * 2 * config.stages <= SHARED
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--shapes", nargs="+", default=[*PRODUCTS, *NARROW])
    args = parser.parse_args()
    report, differ = Report(args.output), 0
    for name in args.shapes:
        rows, columns = {**PRODUCTS, **NARROW}[name]
        copies = max(2, math.ceil(ROTATED_BYTES / (2 * rows * columns)))
        first = (torch.randn(rows, columns, device="cuda") / columns**0.5).bfloat16()
        weights = [first, *(first.clone() for _ in range(copies - 1))]
        for tokens in args.tokens:
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            label, least = f"{name}, {tokens}", 2.0 * (rows * columns + tokens * (rows + columns))
            library = [partial(F.linear, x, weight) for weight in weights]
            report.add(label, "cublas", graph_us(library), least)
            with unsplit():
                wanted = F.linear(x, first)
                report.add(label, "unsplit", graph_us(library), least)
            if triton_rows.takes(first) and tokens <= triton_rows.MAX_TOKENS:
                rows_alone = [partial(triton_rows.linear, x, weight, None) for weight in weights]
                report.add(label, "rows", graph_us(rows_alone), least)
            times = []
            for config in configs(tokens, args.sweep):
                launches = [partial(linear, x, weight, None, None, config) for weight in weights]
                differ += not torch.equal(launches[0](), wanted)
                times.append((graph_us(launches), config))
            times.sort(key=lambda each: each[0])
            for us, config in times[:3]:
                report.add(label, "triton", us, least, note=str(config or ""))
    if differ:
        sys.exit(f"{differ} products have other bits")


if __name__ == "__main__":
    main()
