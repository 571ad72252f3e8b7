"""How a checkpoint publishes matrices of few bits: the interface of all layouts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.quantization.matrix import Matrix

# Tensors that checkpoints hold beside their matrices and that no product needs: scales of inputs
# that are not rounded, of what products return, and of a quantized KV cache.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")

KNOWN = (
    "fp8; compressed-tensors with 8-bit floats and one scale per tensor, channel or block, or "
    "nvfp4-pack-quantized; modelopt with FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, "
    "W4A16_NVFP4, or several of them (MIXED_PRECISION); awq (gemm) and gptq with 4 bits"
)

Read = Callable[[str], Tensor]  # a stored tensor, by name


class StoredTensor(Protocol):
    """A tensor as described in a file's header."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """As safetensors names it: F8_E4M3, I32, …"""


Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Packed(ABC):
    """One matrix as it is stored: its values, and the tensors that belong to them."""

    module: str  # of the checkpoint, whose ``weight`` it is
    values: str  # names of stored tensors
    others: tuple[str, ...]
    shape: tuple[int, ...]  # of the weight it stands for

    @property
    def name(self) -> str:
        return self.module + ".weight"

    @abstractmethod
    def read(self, values: Tensor, read: Read) -> Matrix:
        """The matrix. values: the stored tensor of that name.

        Raises: ValueError if a tensor is missing or does not fit.
        """


Find = Callable[[Stored], list[Packed]]  # matrices of one kind among a checkpoint's tensors


class Layout(NamedTuple):
    """The matrices of a checkpoint, by one tool's conventions."""

    name: str  # the tool and its scheme, for messages; empty: nothing is quantized
    kinds: tuple[Find, ...]
    kv_cache: str = ""  # the scheme for the KV cache, if there is one
    group: int = 1  # neighbouring channels that share a scale
    block: int = 0  # rows and columns that share a scale in float8; 0: they are not blocks

    def matrices(self, stored: Stored) -> list[Packed]:
        """All matrices of few bits among a checkpoint's tensors."""
        return [matrix for find in self.kinds for matrix in find(stored)]


def settings_text(values: Mapping[str, Any], *names: str) -> str:
    """Some keys of a quantization_config, for a refusal."""
    return ", ".join(f"{name} {values[name]!r:.200}" for name in names if name in values)


def unsupported(name: str) -> UnsupportedModel:
    """A refusal. name: the tool and its scheme."""
    return UnsupportedModel(
        f"quantization {name} is not supported; known: {KNOWN}. Use the unquantized checkpoint"
    )
