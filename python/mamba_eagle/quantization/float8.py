"""Float8 weights beside scales: the part that all tools share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounding
from mamba_eagle.quantization.layout import Layout, Packed, Read, Stored
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


class Float8Layout(Layout):
    """Float8 weights under their usual names, with scales beside them."""

    def __init__(
        self,
        name: str,
        inputs: Callable[[str], str],
        block: tuple[int, int] | None = None,
        kv_cache: str = "",
        group: int = 1,
    ) -> None:
        """inputs: how those of a module are rounded. group: of matrices that are not float8."""
        super().__init__(name, kv_cache, lcm(group, *block or ()))
        self.inputs, self.block = inputs, block

    def matrices(self, stored: Stored) -> list[Packed]:
        return [
            self._packed(name.removesuffix(".weight"), stored)
            for name, found in stored.items()
            if name.endswith(".weight") and found.dtype in FLOAT8
        ]

    def _packed(self, module: str, stored: Stored) -> PackedFloat8:
        beside = [module + end for end in (*SCALES, INPUT_SCALE) if module + end in stored]
        name = module + ".weight"
        shape = tuple(stored[name].shape)
        return PackedFloat8(module, name, tuple(beside), shape, self.block, self.inputs(module))


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
    return Float8Layout("fp8", lambda module: inputs, tuple(block) if block else None)
