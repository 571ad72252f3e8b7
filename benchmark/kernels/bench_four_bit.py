"""Times products with weights of four bits, of a 9B model's shapes, beside bfloat16.

    PYTHONPATH=python python -m benchmark.kernels.bench_four_bit --output FILE.jsonl
    … --only nvfp4 --sweep       # configurations of the kernel, the best per shape and tokens

nvfp4, int4: the Triton kernel. wide: the weight is dequantized, then cuBLAS. bf16: cuBLAS. Each
result is compared with float32 first; the script fails where one is wrong. Launches go round copies
of the weight, which together do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.lib.launches import PRODUCTS, ROTATED_BYTES, Report, graph_us
from mamba_eagle.backend.triton.builds import Builders, dry_run
from mamba_eagle.kernels.four_bit import triton as four_bit
from mamba_eagle.kernels.four_bit.torch import dequantize
from mamba_eagle.kernels.four_bit.triton import Config, Weight
from mamba_eagle.kernels.gpu import PROCESSORS

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)
GROUPS = {"nvfp4": (16,), "int4": (128, 32)}  # the first that fits
WITHIN = 5e-3  # relative error; bfloat16 outputs alone are off by 1.7e-3
BF16 = torch.bfloat16

# (rows, tokens, units, slices, warps, stages, registers or 0) by the most tokens they serve
CANDIDATES: dict[int, list[tuple[int, int, int, int, int, int, int]]] = {
    8: [
        (32, 8, 32, 4, 4, 3, 0), (32, 8, 32, 4, 4, 3, 96), (32, 8, 32, 4, 4, 3, 80),
        (32, 8, 32, 4, 4, 4, 0), (16, 8, 32, 4, 4, 4, 0), (16, 8, 32, 4, 4, 4, 64),
        (16, 8, 64, 4, 4, 3, 0), (64, 8, 32, 4, 4, 3, 0), (64, 8, 32, 4, 4, 3, 128),
        (32, 8, 32, 2, 2, 4, 0), (32, 8, 64, 2, 2, 3, 128), (64, 8, 32, 2, 2, 3, 128),
        (16, 8, 32, 8, 8, 3, 0),
    ],
    32: [
        (32, 32, 32, 4, 4, 3, 128), (16, 32, 32, 4, 4, 3, 0), (64, 32, 32, 1, 4, 4, 0),
        (64, 32, 64, 1, 4, 3, 0), (128, 32, 32, 1, 4, 3, 0), (128, 32, 64, 1, 8, 3, 0),
    ],
    64: [
        (64, 64, 32, 1, 4, 4, 0), (64, 64, 64, 1, 4, 3, 0), (128, 64, 32, 1, 4, 3, 0),
        (128, 64, 32, 1, 8, 3, 0), (128, 64, 32, 1, 8, 4, 0), (128, 64, 64, 1, 8, 2, 0),
        (128, 64, 64, 1, 8, 3, 0), (256, 64, 32, 1, 8, 3, 0), (256, 64, 64, 1, 8, 3, 0),
    ],
}  # fmt: skip

Call = Callable[[int], Tensor]  # which copy of the weight


class Form:
    """Copies of one weight [rows, columns] in one form."""

    def __init__(self, name: str, rows: int, columns: int, copies: int = 0) -> None:
        """copies: 0 for as many as do not fit into the L2 cache."""
        self.name = name
        self.bytes = rows * columns / 2
        group = next(each for each in GROUPS[name] if columns % each == 0)
        shape = (rows, columns // group)
        codes = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
        scale = torch.rand(shape, device="cuda") + 0.5
        zero = None
        if name == "nvfp4":
            scale = scale.to(torch.float8_e4m3fn)
        else:
            scale = 0.01 * scale.half()
            zero = torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8)
        self.parts = (codes, scale, zero, torch.full((1, 1), 0.01, device="cuda"))
        first = four_bit.weight_of(*self.parts, BF16)
        self.bytes += first.scale.nbytes
        copies = copies or max(2, math.ceil(ROTATED_BYTES / self.bytes))
        rest = [four_bit.weight_of(*self.parts, BF16) for _ in range(copies - 1)]
        self.weights = [first, *rest]

    def exact(self, x: Tensor) -> Tensor:
        return x.float() @ dequantize(*self.parts).t()


def check(what: str, found: Tensor, exact: Tensor) -> None:
    error = float((found.float() - exact).norm() / exact.norm())
    if not error < WITHIN:
        sys.exit(f"WRONG: {what} with {len(found)} tokens is off by {error:.1e}")


def measure(report: Report, forms: list[str], tokens: list[int], shapes: list[str]) -> None:
    build(forms, tokens, shapes, lambda *size: [four_bit.choose_config(*size)])
    for shape in shapes:
        rows, columns = PRODUCTS[shape]
        made = [Form(name, rows, columns) for name in forms]
        dense = [torch.randn(rows, columns, device="cuda", dtype=BF16) for _ in range(3)]
        for n in tokens:
            x = torch.randn(n, columns, device="cuda").to(BF16)
            timed: list[tuple[str, list[partial[Tensor]], float]] = [
                ("bf16", [partial(F.linear, x, w) for w in dense], 2 * rows * columns)
            ]
            for form in made:
                calls = [partial(four_bit.product, x, w, None) for w in form.weights]
                check(f"{form.name} of {shape}", calls[0](), form.exact(x))
                timed.append((form.name, calls, form.bytes))
            if n == max(tokens):
                timed.append(("wide", [partial(widened_product, x, made[0])], made[0].bytes))
            for name, calls, size in timed:
                fields = {"product": shape, "form": name, "rows": n}
                size += 2 * n * (rows + columns)
                us = graph_us(calls)
                report.add(f"{shape} {n} {name}", "four_bit_product_us", us, size, **fields)
        del made, dense
        torch.cuda.empty_cache()


def widened_product(x: Tensor, form: Form) -> Tensor:
    return F.linear(x, four_bit.dequantize(form.weights[0]))


def candidates(n: int, rows: int, columns: int) -> list[Config]:
    """Configurations worth trying for n tokens: those whose programs are spread evenly."""
    most = min(size for size in CANDIDATES if size >= min(n, 64))
    found = []
    for height, tokens, units, slices, warps, stages, registers in CANDIDATES[most]:
        tiles = math.ceil(rows / height) * math.ceil(n / tokens)
        steps = columns / (4 * units * slices)
        for splits in range(1, 9):
            programs = tiles * splits
            even = programs / (PROCESSORS * math.ceil(programs / PROCESSORS))
            if splits > 1 and (even < 0.84 or programs > 8 * PROCESSORS or steps / splits < 2.5):
                continue
            given = (height, tokens, units, slices, splits, warps, stages)
            found.append(Config(*given, registers or None))
    return found


def launch(x: Tensor, weight: Weight, config: Config) -> Tensor:
    return four_bit.product(x, weight, None, config)


def build(
    forms: list[str],
    tokens: list[int],
    shapes: list[str],
    configs: Callable[[int, int, int], list[Config]],
) -> None:
    """Compiles what a benchmark launches, by all cores."""
    builders = Builders()
    with dry_run() as run:
        for shape in shapes:
            rows, columns = PRODUCTS[shape]
            for name in forms:
                weight = Form(name, rows, columns, copies=1).weights[0]
                for n in tokens:
                    x = torch.zeros(n, columns, device="cuda", dtype=BF16)
                    for config in configs(n, rows, columns):
                        launch(x, weight, config)
                del weight
    torch.cuda.empty_cache()
    print(f"{builders.build(run)} kernels built", flush=True)


def sweep(forms: list[str], tokens: list[int], shapes: list[str], shown: int) -> None:
    """The best configurations, by shape and tokens."""
    build(forms, tokens, shapes, candidates)
    print(*Config._fields)
    for shape in shapes:
        rows, columns = PRODUCTS[shape]
        for name in forms:
            form = Form(name, rows, columns)
            for n in tokens:
                x = torch.randn(n, columns, device="cuda").to(BF16)
                exact = form.exact(x)
                timed = []
                for config in candidates(n, rows, columns):
                    calls = [partial(launch, x, weight, config) for weight in form.weights]
                    try:
                        check(f"{name} of {shape} {tuple(config)}", calls[0](), exact)
                        timed.append((graph_us(calls, replays=3), tuple(config)))
                    except Exception as error:  # too much shared memory for this device
                        print(f"    {tuple(config)}: {str(error)[:60]}")
                own = four_bit.choose_config(n, rows, columns)
                best = "  ".join(f"{us:.1f} {config}" for us, config in sorted(timed)[:shown])
                print(f"{shape} {n} {name} own {tuple(own)}: {best}", flush=True)
                del exact
            del form
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", help="append result lines")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shapes", nargs="+", choices=list(PRODUCTS), default=list(PRODUCTS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shown", type=int, default=4, help="configurations per line of a sweep")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    given = (args.only, args.tokens, args.shapes)
    with torch.inference_mode():
        if args.sweep:
            sweep(*given, args.shown)
        else:
            measure(Report(args.output), *given)


if __name__ == "__main__":
    main()
