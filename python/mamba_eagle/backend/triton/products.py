"""Products on a GPU, and what chooses between their kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from mamba_eagle.kernels.float8 import gluon as few_blocks
from mamba_eagle.kernels.float8 import triton as float8
from mamba_eagle.kernels.float8.torch import E4M3, Rounded, Rounding
from mamba_eagle.kernels.four_bit import gluon as few_tokens
from mamba_eagle.kernels.four_bit import gluon_batches as batches
from mamba_eagle.kernels.four_bit import gluon_shares as shares
from mamba_eagle.kernels.four_bit import triton as four_bit
from mamba_eagle.kernels.gpu import capability
from mamba_eagle.kernels.linear import triton as sixteen_bit
from mamba_eagle.kernels.linear import triton_rows as few_rows
from mamba_eagle.layers.products import MatrixProduct, PackedProduct, WritingProduct
from mamba_eagle.quantization.four_bit import FourBitMatrix
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FLOAT8 = (8, 9)  # compute capability from which float8 is multiplied
ROW_SCALES = (9, 0)  # and from which cuBLASLt and CUTLASS scale rows
BLOCK_SCALES = (9, 0), (12, 9)  # of which, and the CUDA from which, cuBLASLt scales blocks
MULTIPLE = 16  # rows and columns of a float8 product
BLOCK = 128  # columns of a block that the kernel supports; its rows are a multiple
# Up to this many tokens a Triton kernel multiplies.
FEW_TOKENS = 64
FEW_TOKENS_OF_FOUR_BITS = 512  # beyond it the weight is dequantized
# What is fastest at how many tokens was measured (benchmark/decisions.md): first the Triton
# kernel, then cuBLASLt with sums that are scaled in a kernel of their own, up to as many tokens as
# this; then row scales within the library.
MAX_SCALED_AFTER = 128
# A weight of fewer rows has too few programs, so cuBLAS divides its columns.
MANY_ROWS = 2048


class SixteenBitProduct(WritingProduct):
    """Few tokens by the Triton kernel, more by cuBLAS."""

    sizes: tuple[int, ...] = (16, 32, FEW_TOKENS)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if x.ndim == 2 and len(x) <= FEW_TOKENS and x.stride(1) == 1:
            return sixteen_bit.linear(x, self.weight, bias, out)
        return self.library(x, bias, out)

    def library(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is None:
            return F.linear(x, self.weight, bias)
        torch.mm(x, self.weight.t(), out=out)
        return out if bias is None else out.add_(bias)


class FewRowsProduct(SixteenBitProduct):
    """Very few tokens by a program per row, more by cuBLAS."""

    sizes = (few_rows.MAX_TOKENS,)

    def __call__(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if x.ndim == 2 and len(x) <= few_rows.MAX_TOKENS and x.stride(1) == 1:
            return few_rows.linear(x, self.weight, bias, out)
        return self.library(x, bias, out)


def of_sixteen_bits(weight: Tensor) -> SixteenBitProduct | None:
    """The product with a weight [out, in] that is faster than cuBLAS for few tokens, if any."""
    if weight.dtype not in SIXTEEN_BITS:
        return None
    if len(weight) >= MANY_ROWS and weight.shape[1] % MULTIPLE == 0:
        return SixteenBitProduct(weight)
    return FewRowsProduct(weight) if few_rows.takes(weight) else None


def multiplies(matrix: Matrix, device: torch.device) -> bool:
    """Whether there is a product that reads the matrix [out, in] as it is."""
    if isinstance(matrix, FourBitMatrix):
        group, scale = matrix.group, matrix.scale.dtype
        known = matrix.zero is not None or scale == E4M3
        return known and group >= 16 and group & (group - 1) == 0
    if not isinstance(matrix, Float8Matrix) or capability(device) < FLOAT8:
        return False
    rounding, block = matrix.rounding, matrix.block
    if rounding is None or matrix.values.dtype != E4M3 or matrix.shape[-1] % MULTIPLE:
        return False
    if block is None:
        return rounding.group == 0
    return block[0] % BLOCK == 0 and block[1] == BLOCK and rounding.group in (0, BLOCK)


def scales_blocks(values: Tensor) -> bool:
    """Whether cuBLASLt multiplies a weight whose blocks of 128 × 128 have a scale each."""
    capable, cuda = BLOCK_SCALES
    built = tuple(map(int, (torch.version.cuda or "0").split(".")))
    whole = all(size % BLOCK == 0 for size in values.shape)
    return whole and built >= cuda and capability(values.device) == capable


class Float8Product(MatrixProduct):
    """Scales of whole tensors: cuBLASLt. Of rows and tokens: the Triton kernel for few tokens, a
    library for more, which scales or leaves that to us. Of blocks: kernels for very few and for few
    tokens; for many cuBLASLt, where it has such products."""

    sizes: tuple[int, ...] = (
        few_blocks.MAX_TOKENS,
        16,
        32,
        FEW_TOKENS,
        FEW_TOKENS + 1,
        MAX_SCALED_AFTER + 1,
    )

    def __init__(self, matrix: Float8Matrix, dtype: torch.dtype) -> None:
        assert matrix.rounding is not None
        self.rounding: Rounding = matrix.rounding
        self.dtype, self.block = dtype, matrix.block
        self.rows = matrix.shape[0]
        self.scale = matrix.scale.contiguous()
        missing = 0 if self.block else -self.rows % MULTIPLE
        values = matrix.values.contiguous()
        if missing:
            values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(E4M3)
        self.padded, self.weight = values, values[: self.rows]
        self.one = torch.ones(1, 1, device=values.device)
        self.arrived = float8.arrivals(values.device)
        self.column_scale = self.scale.t()
        if missing and len(self.scale) > 1:
            self.column_scale = F.pad(self.column_scale, (0, missing))
        self.row_scaled = dtype == torch.bfloat16 and capability(values.device) >= ROW_SCALES
        self.block_scale: Tensor | None = None
        if self.row_scaled and scales_blocks(values) and self.block == (BLOCK, BLOCK):
            self.block_scale = F.pad(self.scale, (0, -self.scale.shape[1] % 4)).t()

    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        given = float8.rounded(x, self.rounding)
        n = len(given.values)
        if self.block_scale is not None and given.group and n > FEW_TOKENS:
            whole = float8.with_room(given)
            forms = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
            scales = (whole.scale, forms[0], self.block_scale, forms[1])
            y = F.scaled_mm(whole.values, self.weight.t(), *scales, output_dtype=self.dtype)
            y = y if len(y) == n else y[:n]
            return y if bias is None else y + bias
        if self.block is not None:
            operands = given, self.weight, self.scale, bias, self.dtype, self.block
            return few_blocks.product(*operands, self.arrived)
        if given.scale.numel() == 1 and self.scale.numel() == 1:
            return self._library(given, given.scale, self.scale, bias, self.dtype)
        if n <= FEW_TOKENS:
            return float8.product(given, self.weight, self.scale, bias, self.dtype)
        if self.row_scaled and len(self.scale) > 1 and n > MAX_SCALED_AFTER:
            own = given.scale.expand(n, 1).contiguous()
            return self._library(given, own, self.column_scale, bias, self.dtype)
        sums = self._library(given, self.one, self.one, None, torch.float32)
        y = torch.empty(n, self.rows, dtype=self.dtype, device=sums.device)
        float8.join(sums[None], given.scale, self.scale, bias, y)
        return y

    def _library(
        self,
        x: Rounded,
        x_scale: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """x_scale [1, 1] and scale [1, 1], or [n, 1] and [1, padded rows]."""
        whole = self.padded.shape[0] == self.rows
        inside = bias if whole and dtype != torch.float32 else None
        y = torch._scaled_mm(
            x.values, self.padded.t(), scale_a=x_scale, scale_b=scale, bias=inside, out_dtype=dtype
        )
        if not whole:
            y = y[:, : self.rows].contiguous()
        return y if bias is None or inside is not None else y + bias


class FourBitProduct(PackedProduct):
    """Inputs of 16 bits: few tokens are multiplied with the weight as it is; for more it is
    dequantized each time, which takes little beside their product."""

    few_bits = True

    def __init__(self, matrix: FourBitMatrix, dtype: torch.dtype) -> None:
        outputs, inputs = matrix.shape
        super().__init__(outputs, inputs)
        parts = (matrix.codes, matrix.scale, matrix.zero, matrix.factor)
        self.weight = four_bit.weight_of(*parts, dtype)
        self.in_batches = batches.supports(self.weight)
        more = range(FEW_TOKENS + 1, FEW_TOKENS_OF_FOUR_BITS + 1)
        of_more = shares.sizes(more, outputs, inputs) if self.in_batches else more[:1]
        self.sizes = (8, 16, 32, FEW_TOKENS, *of_more, more.stop)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return four_bit.dequantize(self.weight.rows(ids))

    def multiply(self, x: Tensor) -> Tensor:
        return self(x, None)

    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        n = len(x)
        if n > FEW_TOKENS_OF_FOUR_BITS:
            return F.linear(x, four_bit.dequantize(self.weight), bias)
        if n > FEW_TOKENS and self.in_batches:
            return batches.product(x, self.weight, bias)
        if few_tokens.supports(n, self.weight):
            return few_tokens.product(x, self.weight, bias)
        return four_bit.product(x, self.weight, bias)
