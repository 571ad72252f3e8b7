"""What the tests of Triton kernels share: inputs on the device, and the records that kernels take.

Where they run: forms.py.
"""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
from forms import DEVICE, GPU
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Cuda, Host
from mamba_eagle.backend.triton.backend import TritonBackend
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_verify.layout import Sizes, TreeLayout
from mamba_eagle.tree.tree import Tree

# relative error of numbers rounded to bfloat16, where the interpreter cuts
BFLOAT16_ERROR = 3e-3 if GPU else 5e-3
NANO = Sizes(128, 80, 8, 128)  # Nemotron-Nano-9B-v2

Tensors = TypeVar("Tensors", bound=tuple)


def triton_backend(dtype: torch.dtype = torch.float32) -> Backend:
    """A GPU's; without one on a CPU, where the interpreter runs its kernels."""
    place = Cuda(DEVICE) if GPU else Host()
    return TritonBackend(place, dtype, flashinfer=False)


def to_device(parts: Tensors) -> Tensors:
    """A NamedTuple with its tensors moved."""
    moved = (part.to(DEVICE) if isinstance(part, Tensor) else part for part in parts)
    return type(parts)(*moved)


def assert_mostly_equal(found: Tensor, wanted: Tensor) -> None:
    """Equal in the interpreter. A GPU may order sums differently for another dtype of the state:
    then a number in a thousand may be its neighbour."""
    differing = (found != wanted).double().mean()
    assert float(differing) <= (1e-3 if GPU else 0.0)
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-6, atol=1e-6)


def tree_layout(
    tree: Tree,
    slots: Tensor,
    state_slots: Tensor,
    rows: Tensor,
    journal: Tensor | None = None,
    journal_lens: tuple[int, ...] | None = None,
    tail: Tensor | None = None,
    fold: tuple[bool, ...] | None = None,
) -> TreeLayout:
    """On the device. What is left out: no journal, a tail that is not looked at, no fold."""
    b = len(slots)
    empty = torch.zeros(b, 0, dtype=torch.int64)
    layout = TreeLayout(
        slots=slots,
        state_slots=state_slots,
        journal=empty if journal is None else journal,
        journal_len=torch.tensor(journal_lens or [0] * b),
        rows=rows,
        parents=tree.parents,
        ancestors=pack_paths(tree.ancestors)[..., 0],
        tail=torch.zeros(b, 3, dtype=torch.int64) if tail is None else tail,
        fold=None if fold is None else torch.tensor(fold),
    )
    return to_device(layout)
