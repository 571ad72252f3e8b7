"""NVFP4: E2M1 floats with an E4M3 scale per 16 columns and one float32 scale per matrix.

ModelOpt stores ``weight`` (two numbers per byte), ``weight_scale`` and ``weight_scale_2``, which
are multiplied; compressed-tensors stores ``weight_packed``, ``weight_scale`` and
``weight_global_scale``, by which it is divided. Scales of the inputs are not used: inputs keep the
model's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_eagle.kernels.float8.torch import E4M3, LARGEST, to_e4m3
from mamba_eagle.kernels.four_bit.torch import E2M1
from mamba_eagle.quantization.four_bit import FourBitMatrix, pack
from mamba_eagle.quantization.layout import Packed, Read, Stored

GROUP = 16  # columns per scale
ROWS = 8192  # that are rounded at a time


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


def nvfp4_groups(weight: Tensor) -> FourBitMatrix:
    """A weight [out, in] rounded to NVFP4: the largest number of a group becomes 6, the largest
    scale 448. Halves go to the even code.

    Raises: ValueError if columns are no multiple of 16.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"{columns} columns are no multiple of {GROUP}")
    largest = weight.abs().amax().float().clamp(min=1e-30)
    factor = largest / (E2M1[-1] * LARGEST)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, columns // GROUP, dtype=E4M3, device=weight.device)
    bounds = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])], device=weight.device)
    for first in range(0, rows, ROWS):
        part = weight[first : first + ROWS].float().unflatten(-1, (-1, GROUP)) / factor
        own = to_e4m3(part.abs().amax(-1) / E2M1[-1])
        scale[first : first + ROWS] = own
        numbers = (part / own.float().clamp(min=1e-30)[..., None]).flatten(-2)
        size = numbers.abs()
        low = torch.bucketize(size, bounds, out_int32=True)  # a half to the lower code
        high = torch.bucketize(size, bounds, out_int32=True, right=True)
        code = torch.where(low % 2 == 0, low, high)
        codes[first : first + ROWS] = pack(code + 8 * (numbers < 0))
    return FourBitMatrix(codes, scale, None, factor.reshape(1, 1))
