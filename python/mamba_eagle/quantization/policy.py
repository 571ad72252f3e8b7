"""Which matrices are multiplied as few bits: ``--quantization``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mamba_eagle.quantization.matrix import Float8Matrix, Matrix, quantized

HEAD = "lm_head.weight"
MULTIPLE = 16  # columns of a float8 product


class Policy(NamedTuple):
    """How a model's weights are kept.

    auto: as they are stored, where the device multiplies them so. fp8: the same, float8 weights
    also where it does not, and weights of a checkpoint that is not quantized become float8. none:
    all in the model's dtype.
    """

    mode: str = "auto"
    lm_head: bool = False  # whether lm_head becomes float8, too

    def keeps(self, matrix: Matrix, supported: bool) -> bool:
        """Whether a stored matrix stays as it is. supported: by the products of this device."""
        if self.mode == "none":
            return False
        in_float8 = isinstance(matrix, Float8Matrix) and matrix.rounding is not None
        return supported or (self.mode == "fp8" and in_float8)

    def chooses(self, name: str, weight: Tensor) -> bool:
        """Whether a weight [..., out, in] that is stored in 16 or 32 bits becomes float8."""
        if self.mode != "fp8" or weight.shape[-1] % MULTIPLE:
            return False
        return self.lm_head or name != HEAD

    def rounds(self, name: str, weight: Tensor) -> Matrix | None:
        """Such a weight as float8; None: it stays."""
        return quantized(weight) if self.chooses(name, weight) else None
