"""Float8 weights beside scales: the part that all tools share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounding
from mamba_eagle.quantization.layout import Find, Layout, Packed, Read, Stored
from mamba_eagle.quantization.matrix import Float8Matrix, float8_matrix

FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALES = (".weight_scale", ".weight_scale_inv")  # beside ``.weight``; the second is DeepSeek's
INPUT_SCALE = ".input_scale"

# How the inputs of a module's matrix are rounded.
STATIC = "static"  # by the scale that is stored with it
TOKEN = "token"  # one scale per token
NONE = "none"  # not at all


@dataclass(frozen=True)
class PackedFloat8(Packed):
    block: tuple[int, int] | None = None
    inputs: str = NONE  # or a number of channels, for one scale per group of a token

    def read(self, values: Tensor, read: Read) -> Float8Matrix:
        scales = [name for name in self.others if name.endswith(SCALES)]
        if not scales:
            raise ValueError(
                f"the weight is {values.dtype}, but there is no {self.module}{SCALES[0]}"
            )
        return float8_matrix(values, read(scales[0]), self.block, self._rounding(read))

    def _rounding(self, read: Read) -> Rounding | None:
        if self.inputs == NONE:
            return None
        if self.inputs.isdigit():
            return Rounding(group=int(self.inputs))
        static = [name for name in self.others if name.endswith(INPUT_SCALE)]
        if self.inputs == STATIC and static:
            scale = read(static[0]).float()
            if scale.numel() != 1:
                raise ValueError(f"{static[0]} has {scale.numel()} numbers instead of one")
            return Rounding(scale.reshape(1, 1))
        return Rounding()


def float8_layout(
    name: str,
    inputs: Callable[[str], str],
    block: tuple[int, int] | None = None,
    kv_cache: str = "",
    group: int = 1,
    others: Find | None = None,
) -> Layout:
    """Float8 weights under their usual names, with scales beside them. inputs: how those of a
    module are rounded. others: matrices that are not float8; group: theirs."""

    def matrices(stored: Stored) -> list[Packed]:
        found: list[Packed] = []
        for name, tensor in stored.items():
            if name.endswith(".weight") and tensor.dtype in FLOAT8:
                module, shape = name.removesuffix(".weight"), tuple(tensor.shape)
                beside = (module + end for end in (*SCALES, INPUT_SCALE))
                scales = tuple(one for one in beside if one in stored)
                found.append(PackedFloat8(module, name, scales, shape, block, inputs(module)))
        return found

    kinds = (matrices,) if others is None else (matrices, others)
    return Layout(name, kinds, kv_cache, lcm(group, *block or ()), block[0] if block else 0)


def fp8_layout(given: dict[str, Any]) -> Layout:
    """``quant_method: fp8``: DeepSeek's and transformers' checkpoints, with one scale per tensor,
    channel or block (``weight_block_size``, and then inputs in groups of as many channels). given:
    the quantization_config."""
    block = given.get("weight_block_size")
    inputs = TOKEN
    if block:
        inputs = str(block[1])
    elif given.get("activation_scheme") == "static":
        inputs = STATIC
    return float8_layout("fp8", lambda module: inputs, tuple(block) if block else None)
