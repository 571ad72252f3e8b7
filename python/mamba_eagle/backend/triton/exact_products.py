"""Products whose sums have one order for any number of tokens.

In 16 bits that is ordered steps of 16 columns in one accumulator (kernels/linear/triton.py), which
is also what cuBLASLt does where it may not divide the columns. Whether it does is tried for each
shape of a weight, since libraries change; where it does not, the kernel multiplies prompts, too.
In float8 one kernel serves few tokens, another one, with its bits, all other numbers of them.
"""

import logging

import torch
from torch import Tensor

from mamba_eagle.backend.triton import products
from mamba_eagle.backend.triton.experts import fuse_experts
from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.kernels.float8 import triton as float8
from mamba_eagle.kernels.float8 import triton_prompts as prompts
from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.kernels.linear import triton as sixteen_bit
from mamba_eagle.layers.ops import Product
from mamba_eagle.layers.products import ExpertLayer, MatrixProduct
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix

log = logging.getLogger("mamba_eagle.runner")

TRIED = (65, 80, 128, 250, 512, 1024, 3000)  # tokens


class ExactProduct(products.SixteenBitProduct):
    """library: whether cuBLASLt has the kernel's bits."""

    sizes = (*products.SixteenBitProduct.sizes, products.FEW_TOKENS + 1)

    def __init__(self, weight: Tensor, library: bool) -> None:
        super().__init__(weight)
        self.has_library = library

    def library(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if self.has_library and bias is None:
            return super().library(x, None, out)
        if x.ndim == 2:
            return sixteen_bit.linear(x, self.weight, bias, out)
        y = self.library(x.reshape(-1, x.shape[-1]), bias, None)
        return y.unflatten(0, x.shape[:-1])


def library_agrees(weight: Tensor) -> bool:
    """Whether cuBLASLt's products with ``weight`` [out, in] have the kernel's bits."""
    draw = torch.Generator(weight.device).manual_seed(0)
    shape = (max(TRIED), weight.shape[1])
    x = torch.randn(shape, generator=draw, device=weight.device).to(weight.dtype)
    wanted = sixteen_bit.linear(x, weight, None)
    library = products.SixteenBitProduct(weight).library
    return all(torch.equal(library(x[:n], None, None), wanted[:n]) for n in TRIED)


class ExactFloat8(products.Float8Product):
    """Undivided columns for any number of tokens."""

    sizes = (16, 32, products.FEW_TOKENS, *prompts.SIZES)

    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        given = float8.rounded(x, self.rounding)
        multiply = float8.product if len(given.values) <= products.FEW_TOKENS else prompts.product
        return multiply(given, self.weight, self.scale, bias, self.dtype, self.block)


def forbid_partial_sums() -> None:
    """In this process no library adds up parts of a sum. Only cuBLASLt can be asked for that."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    settings.allow_fp16_reduced_precision_reduction = (False, False)


class ExactOps(TritonOps):
    name = "triton"

    def __init__(self) -> None:
        forbid_partial_sums()
        self.tried: dict[tuple[object, ...], bool] = {}

    def pack_linear(self, weight: Tensor) -> Product | None:
        if weight.dtype not in products.SIXTEEN_BITS:  # some of a drafter's, which only guesses
            return None
        kind = (*weight.shape, weight.dtype)
        if kind not in self.tried:
            self.tried[kind] = library_agrees(weight)
            if not self.tried[kind]:
                log.warning("--exact: cuBLASLt divides sums of %s; prompts take longer", kind)
        return ExactProduct(weight, self.tried[kind])

    def pack_matrix(self, matrix: Matrix, dtype: torch.dtype) -> MatrixProduct:
        product = super().pack_matrix(matrix, dtype)
        if isinstance(product, products.Float8Product) and isinstance(matrix, Float8Matrix):
            return ExactFloat8(matrix, dtype)
        return product

    def fuse_experts(
        self, up: Tensor | Matrix, down: Tensor | Matrix, act: str, dtype: torch.dtype
    ) -> ExpertLayer | None:
        return fuse_experts(up, down, act, dtype, self.grouped_linear, exact=True)
