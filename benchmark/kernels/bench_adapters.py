"""Times what adapters add to products on a GPU, beside the product alone and torch's two products.

    PYTHONPATH=python python -m benchmark.kernels.bench_adapters --output FILE.jsonl
    … --sweep       # other configurations

Rows take turns with the adapters. The shapes are those of a 9B model, and launches go round copies
of weights and adapters that do not fit into the L2 cache. ``step``: the products of all its layers.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.lib.launches import PRODUCTS, ROTATED_BYTES, Report, graph_us
from mamba_eagle.backend.triton.adapters import SegmentedAdditions
from mamba_eagle.backend.triton.products import SixteenBitProduct
from mamba_eagle.kernels.adapters import triton as kernels
from mamba_eagle.kernels.adapters.triton import Config, add_, choose_config
from mamba_eagle.layers.adapters import AdapterSize, SeparateAdditions, StackedAddition

TIMES = {"mamba in": 27, "mamba out": 27, "MLP up": 25, "MLP down": 25, "qkv": 4}
QKV = [5120, 1024, 1024]
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


class Sides(NamedTuple):
    """Of one product, copies of all that is read."""

    products: list[SixteenBitProduct]
    fast: list[SegmentedAdditions]
    torch: list[SeparateAdditions]

    @classmethod
    def of(cls, name: str, adapters: int, rank: int, room: int) -> Sides:
        rows, columns = PRODUCTS[name]
        first, sizes = 0, []
        for outputs in QKV if name == "qkv" else [rows]:
            sizes.append(AdapterSize(adapters, room, columns, outputs, first))
            first += outputs
        copies = max(2, math.ceil(ROTATED_BYTES / (2 * rows * columns)))
        made = cls([], [], [])
        for _ in range(copies):
            weight = torch.randn(rows, columns, device=DEVICE, dtype=DTYPE) / columns**0.5
            made.products.append(SixteenBitProduct(weight))
            made.fast.append(SegmentedAdditions(sizes, DTYPE, DEVICE))
            stacked = [StackedAddition(size, DTYPE, DEVICE) for size in sizes]
            made.torch.append(SeparateAdditions(stacked))
            for slot in range(adapters):
                for one in (*made.fast[-1].parts, *stacked):
                    down = torch.randn(rank, one.size.inputs, device=DEVICE, dtype=DTYPE)
                    up = torch.randn(one.size.outputs, rank, device=DEVICE, dtype=DTYPE)
                    one.put(slot, down / columns, up)
        return made


def with_config(
    product: SixteenBitProduct,
    added: SegmentedAdditions,
    x: Tensor,
    slots: Tensor,
    config: Config | None,
) -> None:
    add_(product(x, None), x, slots, added.adapters, early=True, config=config)


def with_calls(
    product: SixteenBitProduct, added: SeparateAdditions, x: Tensor, slots: Tensor
) -> None:
    added(product(x, None), x, slots)


def sweep_of(tokens: int, adapters: int) -> list[Config]:
    usual = choose_config(tokens, adapters)
    found = [
        usual._replace(chunk=chunk, side=side, warps=warps)
        for chunk, side, warps in itertools.product((512, 1024, 2048), (0, 1, 2, 4, 8), (4, 8))
    ]
    return found + [usual._replace(tokens=t) for t in (16, 32, 64, 128) if t != usual.tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128, 256, 512, 2048])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--room", type=int, default=64, help="ranks that slots have room for")
    parser.add_argument("--channels", type=int, default=kernels.CHANNELS)
    parser.add_argument("--shapes", nargs="+", default=list(TIMES))
    args = parser.parse_args()
    kernels.CHANNELS = args.channels
    report = Report(args.output)
    total = {(n, kind): 0.0 for n in args.tokens for kind in ("alone", "triton", "torch")}
    for name in args.shapes:
        sides = Sides.of(name, args.adapters, args.rank, args.room)
        rows, columns = PRODUCTS[name]
        for n in args.tokens:
            x = torch.randn(n, columns, device=DEVICE, dtype=DTYPE)
            slots = torch.arange(n, device=DEVICE) * args.adapters // max(n, args.adapters)
            alone = [partial(product, x, None) for product in sides.products]
            pairs = list(zip(sides.products, sides.torch, strict=True))
            beside = [partial(with_calls, *pair, x, slots) for pair in pairs]
            times = {"alone": graph_us(alone), "torch": graph_us(beside)}
            found = []
            for config in [None, *(sweep_of(n, args.adapters) if args.sweep else ())]:
                both = zip(sides.products, sides.fast, strict=True)
                run = [partial(with_config, *pair, x, slots, config) for pair in both]
                found.append((graph_us(run), config))
            times["triton"] = found[0][0]
            used = min(n, args.adapters) * args.rank
            least = {"alone": 0, "triton": used, "torch": args.adapters * args.room}
            for kind, us in times.items():
                total[n, kind] += TIMES[name] * us
                num_bytes = 2.0 * (rows * columns + least[kind] * (rows + columns))
                ratio = f"{us / times['alone']:.3f}"
                report.add(f"{name}, {n}, {kind}", f"adapters {kind}", us, num_bytes, note=ratio)
            for us, config in sorted(found[1:], key=lambda each: each[0])[:4]:
                report.add(f"{name}, {n}", "adapters sweep", us, note=str(config))
    for (n, kind), us in total.items():
        note = f"{us / total[n, 'alone']:.3f}"
        report.add(f"step, {n}, {kind}", f"adapters step {kind}", us, note=note)


if __name__ == "__main__":
    main()
