"""NVFP4: E2M1 floats with an E4M3 scale per 16 columns and one float32 scale per matrix.

ModelOpt stores ``weight`` (two numbers per byte), ``weight_scale`` and ``weight_scale_2``, which
are multiplied; compressed-tensors stores ``weight_packed``, ``weight_scale`` and
``weight_global_scale``, by which it is divided. Scales of the inputs are not used: inputs keep the
model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mamba_eagle.quantization.four_bit import FourBitMatrix
from mamba_eagle.quantization.layout import Packed, Read, Stored

GROUP = 16  # columns per scale


@dataclass(frozen=True)
class PackedFp4(Packed):
    global_scale: str = ""  # name of a stored tensor
    divides: bool = False  # whether that one is a divisor

    def read(self, values: Tensor, read: Read) -> FourBitMatrix:
        scale, factor = read(self.others[0]), read(self.global_scale).float()
        rows, columns = self.shape
        if tuple(scale.shape) != (rows, -(-columns // GROUP)) or columns % GROUP:
            raise ValueError(
                f"scales {list(scale.shape)} do not fit {list(self.shape)} in groups of {GROUP}"
            )
        if factor.numel() != 1:
            raise ValueError(f"{self.global_scale} has {factor.numel()} numbers instead of one")
        factor = factor.reshape(1, 1)
        return FourBitMatrix(values, scale, None, 1.0 / factor if self.divides else factor)


def modelopt_matrices(stored: Stored) -> list[Packed]:
    """Modules with a second scale, by ModelOpt's names."""
    return _matrices(stored, "weight", "weight_scale_2", "input_scale", divides=False)


def compressed_matrices(stored: Stored) -> list[Packed]:
    """The same by those of compressed-tensors."""
    names = ("weight_packed", "weight_global_scale", "input_global_scale")
    return _matrices(stored, *names, divides=True)


def _matrices(
    stored: Stored, values: str, global_scale: str, of_inputs: str, divides: bool
) -> list[Packed]:
    found: list[Packed] = []
    for name in stored:
        module, _, leaf = name.rpartition(".")
        if leaf != global_scale or f"{module}.{values}" not in stored:
            continue
        rows, half = stored[f"{module}.{values}"].shape
        others = (f"{module}.weight_scale", name, f"{module}.{of_inputs}")
        found.append(
            PackedFp4(
                module,
                f"{module}.{values}",
                tuple(other for other in others if other in stored or other == others[0]),
                (rows, 2 * half),
                global_scale=name,
                divides=divides,
            )
        )
    return found
