"""Times products of few bits of a 9B model's shapes, beside bfloat16 and the bytes they must read.

    PYTHONPATH=python python -m benchmark.kernels.bench_float8 --output FILE.jsonl
    … --sweep       # other configurations of the Triton kernel, for few tokens

bf16: cuBLAS. tensor: cuBLASLt with one scale each. row: a scale per row and token, by CUTLASS.
after: cuBLASLt without scales to float32, then a kernel that scales. triton: the kernel that scales
rows and tokens as it ends. Rounding of the inputs is not timed. Four bits: bench_four_bit.py. Each
result is compared with float32 first; the script fails where one is wrong. Launches go round
copies of the weight, which together do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.lib.launches import PRODUCTS, ROTATED_BYTES, Report, graph_us
from mamba_eagle.kernels.float8 import triton as float8
from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.quantization.matrix import Float8Matrix, quantized

TOKENS = (1, 8, 32, 64, 256, 8192)
FEW = 64  # tokens, up to which the Triton kernels are measured
WITHIN = {"bf16": 5e-3}  # relative error; of float8 products:
FLOAT8_WITHIN = 6e-3

Call = Callable[[int], Tensor]  # which copy of the weight


class Weight:
    """Copies of one weight in each form."""

    def __init__(self, rows: int, columns: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)
        shape = (rows, columns)
        dense = torch.randn(shape, generator=generator, device="cuda").mul_(0.05).bfloat16()
        self.copies = max(2, math.ceil(ROTATED_BYTES / dense.numel()))
        self.matrix = quantized(dense)
        self.dense = [dense.clone() for _ in range(min(self.copies, 3))]
        self.values = [self.matrix.values.clone() for _ in range(self.copies)]
        self.one = torch.ones(1, 1, device="cuda")

    def calls(self, x: Tensor) -> dict[str, Call]:
        """x [n, in] bfloat16."""
        n, scale = len(x), self.matrix.scale
        given = float8.rounded(x, Rounding())
        own = given.scale.contiguous()
        mm = partial(torch._scaled_mm, given.values)
        made: dict[str, Call] = {
            "bf16": lambda i: F.linear(x, self.dense[i % len(self.dense)]),
            "tensor": lambda i: mm(
                self.values[i].t(), scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16
            ),
            "row": lambda i: mm(
                self.values[i].t(), scale_a=own, scale_b=scale.t(), out_dtype=torch.bfloat16
            ),
            "after": partial(self._scaled_after, given),
        }
        if n <= FEW:
            made["triton"] = lambda i: float8.product(
                given, self.values[i], scale, None, torch.bfloat16
            )
        return made

    def _scaled_after(self, given: Rounded, i: int) -> Tensor:
        sums = torch._scaled_mm(
            given.values,
            self.values[i].t(),
            scale_a=self.one,
            scale_b=self.one,
            out_dtype=torch.float32,
        )
        y = torch.empty(sums.shape, dtype=torch.bfloat16, device="cuda")
        float8.join(sums[None], given.scale, self.matrix.scale, None, y)
        return y

    def exact(self, name: str, x: Tensor) -> Tensor:
        """What a form should give, in float32."""
        if name == "bf16":
            return x.float() @ self.dense[0].float().t()
        given = float8.rounded(x, Rounding())
        sums = given.values.float() @ self.matrix.values.float().t()
        return sums if name == "tensor" else sums * given.scale * self.matrix.scale.t()


def check(name: str, shape: str, found: Tensor, exact: Tensor) -> None:
    error = float((found.float() - exact).norm() / exact.norm())
    if not error < WITHIN.get(name, FLOAT8_WITHIN):
        sys.exit(f"WRONG: {name} of {shape} with {len(found)} tokens is off by {error:.1e}")


def measure(report: Report, tokens: tuple[int, ...]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, (rows, columns) in PRODUCTS.items():
        weight = Weight(rows, columns)
        for n in tokens:
            x = torch.randn(n, columns, device="cuda").bfloat16()
            for form, call in weight.calls(x).items():
                if n <= 256:
                    check(form, name, call(0), weight.exact(form, x))
                copies = len(weight.dense) if form == "bf16" else weight.copies
                count = 2 if n > 256 else copies
                launches = [partial(call, i) for i in range(count)]
                us = graph_us(launches, replays=9 if n <= 256 else 1)
                size = rows * columns * (2.0 if form == "bf16" else 1.0)
                size += 2 * n * (rows + columns)
                label = f"{name} {n} {form}"
                fields = {"product": name, "form": form, "rows": n}
                report.add(label, "float8_product_us", us, size, **fields)
        del weight
        torch.cuda.empty_cache()


def sweep(report: Report) -> None:
    """The best configurations for few tokens, by shape."""
    for name, (rows, columns) in PRODUCTS.items():
        weight = Weight(rows, columns)
        for n in (1, 32):
            x = torch.randn(n, columns, device="cuda").bfloat16()
            given = float8.rounded(x, Rounding())
            timed = []
            chosen = float8.choose_config(n, rows, False)
            for height, stages, ahead in itertools.product((64, 128), (4, 5, 6, 8, 10, 12), (0, 4)):
                config = float8.Config(height, chosen.tokens, height // 16, stages, ahead)
                timed.append((time_config(weight, given, config), config))
            own = time_config(weight, given, chosen)
            print(f"{name} {n}: chosen {own:.1f} us {tuple(chosen)}")
            for us, config in sorted(timed)[:3]:
                print(f"    {us:.1f} us {tuple(config)}", flush=True)
        del weight
        torch.cuda.empty_cache()


def time_config(weight: Weight, given: Rounded, config: float8.Config) -> float:
    matrix: Float8Matrix = weight.matrix
    launches = [
        partial(float8.product, given, values, matrix.scale, None, torch.bfloat16, None, config)
        for values in weight.values
    ]
    try:
        return graph_us(launches, replays=3)
    except Exception as error:  # too much shared memory for this device
        print(f"    {tuple(config)}: {str(error)[:60]}")
        return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", help="append result lines")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    report = Report(args.output)
    with torch.inference_mode():
        if args.sweep:
            sweep(report)
        else:
            measure(report, tuple(args.tokens))


if __name__ == "__main__":
    main()
