"""Checkpoints of four-bit integers, eight of which share an int32: GPTQ and AWQ.

GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it: ``qweight`` [in / 8, out], ``qzeros``
[groups, out / 8] and ``scales`` [groups, out]; of eight neighbours the first is in the lowest bits.
``g_idx`` [in] is the group of each column. The first format stores zero points less 1;
``checkpoint_format: gptq_v2`` stores them as they are.

AWQ (arXiv 2306.00978), as AutoAWQ stores it for its GEMM kernels: ``qweight`` [in, out / 8], and
the others as above; from the lowest bits on there are outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.quantization.four_bit import FourBitMatrix, pack
from mamba_eagle.quantization.layout import Layout, Packed, Read, Stored, settings_text, unsupported

FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points
IN_ORDER, AWQ_ORDER = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(packed: Tensor, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """[n, m / 8] int32 -> [n, m] uint8. order: which of eight each group of four bits is, from the
    lowest."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((packed[..., None] >> shifts) & 15).to(torch.uint8)
    ordered = torch.empty_like(codes)
    ordered[..., list(order)] = codes
    return ordered.flatten(-2)


@dataclass(frozen=True)
class PackedIntegers(Packed):
    order: tuple[int, ...]
    added: int  # to stored zero points
    by_inputs: bool  # eight inputs share an int32, not eight outputs

    def read(self, values: Tensor, read: Read) -> FourBitMatrix:
        zeros, scales = read(self.others[0]), read(self.others[1])
        rows, columns = self.shape
        if len(scales) == 0 or columns % len(scales) or scales.shape[1] != rows:
            raise ValueError(f"scales {list(scales.shape)} do not fit {list(self.shape)}")
        if len(self.others) > 2:
            of_column = read(self.others[2]).long()
            if not torch.equal(of_column, torch.arange(columns) // (columns // len(scales))):
                raise ValueError(
                    f"{self.others[2]} puts columns into groups out of order (desc_act), which is "
                    "not supported; use a checkpoint made with desc_act false"
                )
        zero = (unpack(zeros, self.order) + self.added).t().contiguous()
        if self.by_inputs:
            codes = unpack(values.t().contiguous(), self.order)  # [out, in]
        else:
            codes = unpack(values, self.order).t()
        return FourBitMatrix(pack(codes), scales.t().contiguous(), zero, torch.ones(1, 1))


def integer_layout(
    name: str, order: tuple[int, ...], added: int, by_inputs: bool, group: int | None
) -> Layout:
    """group: -1 for one per row. The others: as of PackedIntegers."""

    def matrices(stored: Stored) -> list[Packed]:
        found: list[Packed] = []
        for name in stored:
            module, _, leaf = name.rpartition(".")
            if leaf != "qweight":
                continue
            others = [f"{module}.qzeros", f"{module}.scales"]
            if f"{module}.g_idx" in stored:
                others.append(f"{module}.g_idx")
            first, last = stored[name].shape
            shape = (last, 8 * first) if by_inputs else (8 * last, first)
            own = (module, name, tuple(others), shape)
            found.append(PackedIntegers(*own, order, added, by_inputs))
        return found

    return Layout(name, (matrices,), group=max(1, group or 1))


def gptq_layout(given: dict[str, Any]) -> Layout:
    """given: the quantization_config.

    Raises: UnsupportedModel unless it is 4 bits in a known format.
    """
    form = given.get("checkpoint_format") or "gptq"
    if given.get("bits") != 4 or form not in FORMATS:
        raise unsupported(f"gptq ({settings_text(given, 'bits', 'checkpoint_format')})")
    return integer_layout("gptq (4 bits)", IN_ORDER, FORMATS[form], True, given.get("group_size"))


def awq_layout(given: dict[str, Any]) -> Layout:
    """given: the quantization_config.

    Raises: UnsupportedModel unless it is 4 bits with zero points in the GEMM format.
    """
    version = str(given.get("version", "gemm")).lower()
    bits = given.get("bits", given.get("w_bit"))
    if bits != 4 or version != "gemm" or given.get("zero_point") is False:
        raise unsupported(f"awq ({settings_text(given, 'bits', 'version', 'zero_point')})")
    group = given.get("group_size", given.get("q_group_size"))
    return integer_layout("awq (4 bits)", AWQ_ORDER, 0, False, group)
