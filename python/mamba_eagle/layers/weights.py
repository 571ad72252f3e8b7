"""Weights that come late: allocated when they are loaded, or held as matrices of few bits."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from mamba_eagle.layers.layer import Layer
from mamba_eagle.quantization.matrix import DenseMatrix, Matrix

META = torch.device("meta")
_come_late: ContextVar[bool] = ContextVar("come_late", default=False)


@contextlib.contextmanager
def weights_come_late() -> Iterator[None]:
    """Layers made inside have weights without memory, which ``MatrixLayer.allocate`` or
    ``MatrixLayer.hold`` replaces: a model of few bits never takes the memory of its 16."""
    token = _come_late.set(True)
    try:
        yield
    finally:
        _come_late.reset(token)


def without_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that has only shape and dtype. Made of these, and not by an operation on another
    such tensor: torch does most of those in Python, and for the first one loads its compiler and
    sympy, which takes longer than all else of a start."""
    return torch.empty(shape, dtype=dtype, device=META)


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """The parts [n, in], ..., one below the other; without memory if they have none."""
    if any(part.device != META for part in parts):
        return torch.cat(list(parts))
    rows = sum(part.shape[0] for part in parts)
    return without_memory((rows, *parts[0].shape[1:]), parts[0].dtype)


def empty_weight(*shape: int) -> nn.Parameter:
    """A weight in the default dtype; without memory where weights come late."""
    return nn.Parameter(torch.empty(*shape, device=META if _come_late.get() else None))


class MatrixLayer(Layer):
    """A layer whose weights are matrices [out, in], or stacks of them [E, out, in].

    Each is either a parameter or, after ``hold``, a matrix of few bits in its place; then the
    parameter only keeps shape and dtype.
    """

    matrix_names: tuple[str, ...] = ("weight",)
    may_hold = True  # False: something else reads the parameters, so they keep their dtype

    def __init__(self) -> None:
        super().__init__()
        self.matrices: dict[str, Matrix] = {}  # by parameter
        self._stacks: dict[str, dict[int, Matrix]] = {}  # of experts, until ``assemble``
        # of experts, until the other one comes
        self._halves: dict[tuple[str, int], dict[int, Matrix]] = {}

    def allocate(self, name: str, device: torch.device) -> None:
        """Give the parameter its memory, if it has none."""
        empty: nn.Parameter = getattr(self, name)
        if empty.device == META:
            self._replace(name, torch.empty(empty.shape, dtype=empty.dtype, device=device))
            weight = getattr(self, name).detach()
            for index, matrix in self._stacks.pop(name, {}).items():
                weight[index].copy_(matrix.dequantize())
            for stack, index in [key for key in self._halves if key[0] == name]:
                for half, matrix in self._halves.pop((stack, index)).items():
                    weight[index].chunk(2)[half].copy_(matrix.dequantize())

    def hold(
        self, name: str, matrix: Matrix, index: int | None = None, half: int | None = None
    ) -> None:
        """Use ``matrix`` in place of the parameter, of its slice ``index``, or of the first or
        second half of that slice's rows, where it waits for the other half."""
        weight: nn.Parameter = getattr(self, name)
        if half is not None:
            assert index is not None
            if weight.device != META:
                weight.detach()[index].chunk(2)[half].copy_(matrix.dequantize())
                return
            halves = self._halves.setdefault((name, index), {})
            halves[half] = matrix
            if len(halves) < 2:
                return
            matrix = joined_halves(self._halves.pop((name, index)))
        if index is None:
            self._replace(name, without_memory(weight.shape, weight.dtype))
            self.matrices[name] = matrix
        elif weight.device != META:  # other slices are not of few bits
            weight.detach()[index].copy_(matrix.dequantize())
        else:
            self._stacks.setdefault(name, {})[index] = matrix

    def assemble(self) -> None:
        """Stack the slices, once all are there."""
        for name, parts in self._stacks.items():
            ordered = [parts[index] for index in sorted(parts)]
            stacked = type(ordered[0]).stack(ordered)
            if stacked is not None:
                self.matrices[name] = stacked
            else:  # forms that differ from expert to expert
                self._replace(name, torch.stack([part.dequantize() for part in ordered]))
        self._stacks = {}

    def widen(self, name: str) -> None:
        """Replace a matrix of few bits by a parameter of the model's dtype."""
        self._replace(name, self.matrices.pop(name).dequantize())

    def _replace(self, name: str, weight: Tensor) -> None:
        """In the parameter's dtype."""
        weight = weight.to(getattr(self, name).dtype)
        setattr(self, name, nn.Parameter(weight, requires_grad=False))


def joined_halves(halves: dict[int, Matrix]) -> Matrix:
    """Both as one matrix, in their own form if that is the same."""
    parts = [halves[0], halves[1]]
    joined = type(parts[0]).join(parts) if type(parts[0]) is type(parts[1]) else None
    return joined or DenseMatrix(torch.cat([part.dequantize() for part in parts]))


def matrix_layers(model: nn.Module) -> Iterator[tuple[str, MatrixLayer]]:
    """The layers with matrices, each with its name in the model."""
    for name, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            yield name, module


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, as they are kept."""
    dense = sum(p.nbytes for p in model.parameters() if p.device != META)
    held = (layer.matrices.values() for _, layer in matrix_layers(model))
    return dense + sum(matrix.nbytes for matrices in held for matrix in matrices)
