"""GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

``qweight`` [in / 8, out], ``qzeros`` [groups, out / 8] and ``scales`` [groups, out]: an int32 holds
eight neighbours, the first in its lowest bits. ``g_idx`` [in] is the group of each column. The
first format stores zero points less 1; ``checkpoint_format: gptq_v2`` stores them as they are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.quantization.four_bit import FourBitMatrix, pack
from mamba_eagle.quantization.layout import Layout, Packed, Read, Stored, settings_text, unsupported

FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points


def unpack(packed: Tensor) -> Tensor:
    """[n, m / 8] int32 -> [n, m] uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)


@dataclass(frozen=True)
class PackedGptq(Packed):
    added: int = 1  # to stored zero points

    def read(self, values: Tensor, read: Read) -> FourBitMatrix:
        zeros, scales = read(self.others[0]), read(self.others[1])
        rows, columns = self.shape
        if len(scales) == 0 or columns % len(scales) or scales.shape[1] != rows:
            raise ValueError(f"scales {list(scales.shape)} do not fit {list(self.shape)}")
        groups = len(scales)
        if len(self.others) > 2:
            of_column = read(self.others[2]).long()
            if not torch.equal(of_column, torch.arange(columns) // (columns // groups)):
                raise ValueError(
                    f"{self.others[2]} puts columns into groups out of order (desc_act), which is "
                    "not supported; use a checkpoint made with desc_act false"
                )
        zero = (unpack(zeros) + self.added).t().contiguous()
        codes = unpack(values.t().contiguous())  # [out, in]
        return FourBitMatrix(pack(codes), scales.t().contiguous(), zero, torch.ones(1, 1))


class GptqLayout(Layout):
    def __init__(self, name: str, added: int) -> None:
        super().__init__(name)
        self.added = added

    def matrices(self, stored: Stored) -> list[Packed]:
        found: list[Packed] = []
        for name in stored:
            module, _, leaf = name.rpartition(".")
            if leaf != "qweight":
                continue
            packed, rows = stored[name].shape
            others = [f"{module}.qzeros", f"{module}.scales"]
            if f"{module}.g_idx" in stored:
                others.append(f"{module}.g_idx")
            shape = (rows, 8 * packed)
            found.append(PackedGptq(module, name, tuple(others), shape, self.added))
        return found


def layout(given: dict[str, Any]) -> Layout:
    """given: the quantization_config.

    Raises: UnsupportedModel unless it is 4 bits in a known format.
    """
    form = given.get("checkpoint_format") or "gptq"
    if given.get("bits") != 4 or form not in FORMATS:
        raise unsupported(f"gptq ({settings_text(given, 'bits', 'checkpoint_format')})")
    return GptqLayout("gptq (4 bits)", FORMATS[form])
