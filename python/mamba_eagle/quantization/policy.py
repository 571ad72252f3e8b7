"""Which matrices are multiplied as few bits: ``--quantization``."""

from typing import NamedTuple

from torch import Tensor

from mamba_eagle.quantization.grouped import GROUP, int4_groups, int8_groups
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix, quantized
from mamba_eagle.quantization.nvfp4 import nvfp4_groups

HEAD = "lm_head.weight"
MULTIPLE = 16  # columns of a float8 product, and of NVFP4's groups


class Policy(NamedTuple):
    """How a model's weights are kept.

    auto: as they are stored, where the device multiplies them so. fp8: the same, float8 weights
    also where it does not, and weights of a checkpoint that is not quantized become float8. nvfp4:
    these become floats of four bits, which a GPU multiplies. int8, int4: these become integers in
    groups, which a CPU multiplies. none: all in the model's dtype.
    """

    mode: str = "auto"
    # Whether lm_head follows: with fp8 and nvfp4 it keeps its dtype otherwise, with int4 it becomes
    # int8. With int8 it always does.
    lm_head: bool = False
    block: int = 0  # of what becomes float8, as in ``quantized``

    @property
    def group(self) -> int:
        """Columns that a part of a matrix has a multiple of, if it is to be rounded; 1: none is."""
        return {"fp8": MULTIPLE, "nvfp4": MULTIPLE, "int8": GROUP, "int4": GROUP}.get(self.mode, 1)

    def keeps(self, matrix: Matrix, supported: bool) -> bool:
        """Whether a stored matrix stays as it is. supported: by the products of this device."""
        if self.mode == "none":
            return False
        in_float8 = isinstance(matrix, Float8Matrix) and matrix.rounding is not None
        return supported or (self.mode == "fp8" and in_float8)

    def bits(self, name: str, weight: Tensor) -> int | None:
        """Of a weight [..., out, in] that is stored in 16 or 32 bits; None: it keeps them."""
        (rows, columns), head = weight.shape[-2:], name == HEAD and not self.lm_head
        if self.mode in ("fp8", "nvfp4"):
            # A single row takes longer in few bits. Checkpoints in blocks publish the gates of a
            # delta rule, which have fewer rows than a block, in 16 bits.
            misfit = rows < max(2, self.block) or columns % MULTIPLE
            return None if misfit or head else 8 if self.mode == "fp8" else 4
        if self.mode not in ("int8", "int4") or columns % GROUP:
            return None
        return 8 if self.mode == "int8" or head else 4

    def rounds(self, name: str, weight: Tensor) -> Matrix | None:
        """Such a weight in its bits; None: it stays."""
        bits = self.bits(name, weight)
        if bits is None:
            return None
        if self.mode == "fp8":
            return quantized(weight, self.block)
        if self.mode == "nvfp4":
            return nvfp4_groups(weight)
        return int8_groups(weight) if bits == 8 else int4_groups(weight)
