"""AWQ (arXiv 2306.00978), as AutoAWQ stores it for its GEMM kernels.

``qweight`` [in, out / 8], ``qzeros`` [groups, out / 8] and ``scales`` [groups, out]: an int32 holds
eight neighbouring outputs, of which its bits from the lowest on are numbers 0, 2, 4, 6, 1, 3, 5, 7.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.quantization.four_bit import FourBitMatrix, pack
from mamba_eagle.quantization.layout import Layout, Packed, Read, Stored, settings_text, unsupported

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each group of four bits, from the lowest


def unpack(packed: Tensor) -> Tensor:
    """[n, out / 8] int32 -> [n, out] uint8, in the order of the outputs."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((packed[..., None] >> shifts) & 15).to(torch.uint8)
    ordered = torch.empty_like(codes)
    ordered[..., list(ORDER)] = codes
    return ordered.flatten(-2)


@dataclass(frozen=True)
class PackedAwq(Packed):
    def read(self, values: Tensor, read: Read) -> FourBitMatrix:
        zeros, scales = (read(name) for name in self.others)
        rows, columns = self.shape
        if len(scales) == 0 or columns % len(scales) or scales.shape[1] != rows:
            raise ValueError(f"scales {list(scales.shape)} do not fit {list(self.shape)}")
        zero = unpack(zeros).t().contiguous()
        codes = pack(unpack(values).t())
        return FourBitMatrix(codes, scales.t().contiguous(), zero, torch.ones(1, 1))


class AwqLayout(Layout):
    def matrices(self, stored: Stored) -> list[Packed]:
        found: list[Packed] = []
        for name in stored:
            module, _, leaf = name.rpartition(".")
            if leaf != "qweight":
                continue
            columns, packed = stored[name].shape
            others = (f"{module}.qzeros", f"{module}.scales")
            found.append(PackedAwq(module, name, others, (8 * packed, columns)))
        return found


def layout(given: dict[str, Any]) -> Layout:
    """given: the quantization_config.

    Raises: UnsupportedModel unless it is 4 bits with zero points in the GEMM format.
    """
    version = str(given.get("version", "gemm")).lower()
    bits = given.get("bits", given.get("w_bit"))
    if bits != 4 or version != "gemm" or given.get("zero_point") is False:
        raise unsupported(f"awq ({settings_text(given, 'bits', 'version', 'zero_point')})")
    return AwqLayout("awq (4 bits)")
