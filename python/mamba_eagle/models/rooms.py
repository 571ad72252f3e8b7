"""Where a checkpoint's tensors go: parameters, buffers, or matrices of few bits; and whether there
is memory for them, known before the first is read."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mamba_eagle.config import ConfigError
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.weights import META, MatrixLayer, matrix_layers, without_memory
from mamba_eagle.models.base import Target
from mamba_eagle.quantization.matrix import DenseMatrix, Matrix
from mamba_eagle.quantization.policy import HEAD, Policy

ON_HOST, ON_GPU = ("int8", "int4"), ("fp8", "nvfp4")  # --quantization, by what multiplies them


class Rooms:
    """A model's parameters and buffers, such as a head's token map, while they are filled.

    Weights that came late are allocated as they are filled, on ``device``.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self.model, self.device = model, device or torch.device("cpu")
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.layers: dict[str, tuple[MatrixLayer, str]] = {}
        for name, layer in matrix_layers(model):
            for leaf in layer.matrix_names:
                self.layers[f"{name}.{leaf}" if name else leaf] = (layer, leaf)

    def device_of(self, parameter: Tensor) -> torch.device:
        return self.device if parameter.device == META else parameter.device

    def put(self, target: Target, value: Tensor | Matrix) -> None:
        """Copy ``value``, which may be one number for all, to its place."""
        if isinstance(value, Matrix):
            value = value.dequantize()
        if target.name in self.layers:
            layer, leaf = self.layers[target.name]
            layer.allocate(leaf, self.device)
            self._copy(getattr(layer, leaf), target, value)
        else:
            self._copy(self.tensors[target.name], target, value)

    def _copy(self, room: Tensor, target: Target, value: Tensor) -> None:
        room = room.detach()
        if target.index is not None:
            room = room[target.index]
        if target.half is not None:
            room = room.chunk(2)[target.half]
        room.copy_(scaled(value, target))

    def turn(self, name: str) -> int:
        """When a parameter is filled: those of a lower turn come first, others in the order of the
        files."""
        return 0

    def begin(self, path: str, stored: float) -> None:
        """Nothing has been put yet. stored: bytes of an element in the files, on average.

        Raises: ConfigError if there is no room for all.
        """

    def of_few_bits(self) -> None:
        """The checkpoint has matrices of few bits; what it keeps in 16 bits is meant to stay."""

    def finish(self) -> None:
        """Everything has been put."""
        for layer, _ in self.layers.values():
            layer.assemble()


class FewBitRooms(Rooms):
    """Rooms of a model that keeps a checkpoint's matrices of few bits, and that may round others,
    as ``policy`` says. The model's weights come late."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        policy: Policy,
        supported: Callable[[Matrix, torch.device], bool],
        free: int | None = None,
        on_host: bool = True,
    ) -> None:
        """supported: whether products of the device read a matrix as it is. free: bytes of the
        device's memory that may be taken; None: whatever there is."""
        super().__init__(model, device)
        self.policy, self.supported, self.free = policy, supported, free
        self.on_host = on_host
        self.embeddings = {
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if isinstance(layer, Embedding)
        }
        head = dict(model.named_modules()).get("lm_head")
        self.tied = next(
            (
                one
                for one in self.embeddings.values()
                if one.weight is getattr(head, "weight", None)
            ),
            None,
        )
        self.tied_matrix: Matrix | None = None  # the tied weight, if it is stored in few bits
        # a rank has a part of lm_head, and the whole embedding
        self.head_is_whole = getattr(getattr(model, "config", None), "head_tokens", None) is None
        self.rounds = True  # whether what is stored in 16 bits may be rounded

    def begin(self, path: str, stored: float) -> None:
        if self.free is None:
            return
        policy = self.policy if self.rounds else Policy()
        refuse_too_large(self.model, path, policy, stored, self.free, self.on_host)

    def of_few_bits(self) -> None:
        self.rounds = False

    def put(self, target: Target, value: Tensor | Matrix) -> None:
        is_tied = self.tied is not None and self.embeddings.get(target.name) is self.tied
        if is_tied and isinstance(value, Matrix) and self._keeps(value):
            self.tied_matrix = value.to(self.device)
            if self.head_is_whole:  # which the embedding reads its rows from
                assert self.tied is not None
                empty = without_memory(self.tied.weight.shape, self.tied.weight.dtype)
                self.tied.weight = nn.Parameter(empty, requires_grad=False)
                return
        held = self._matrix(target, value)
        if held is None:
            super().put(target, value)
            return
        layer, leaf = self.layers[target.name]
        layer.hold(leaf, held, target.index, target.half)

    def _matrix(self, target: Target, value: Tensor | Matrix) -> Matrix | None:
        """What the layer holds instead of a parameter."""
        if target.name not in self.layers or not self.layers[target.name][0].may_hold:
            return None
        if isinstance(value, Matrix):
            if not self._keeps(value):
                return None
            matrix = value if is_one(target.scale) else value.times(target.scale)
            return None if matrix is None else matrix.to(self.device)
        if value.ndim < 2:
            return None
        if self.rounds:
            rounded = self.policy.rounds(target.name, scaled(value, target).to(self.device))
            if rounded is not None:
                return rounded
        return self._as_stored(target, value)

    def _keeps(self, matrix: Matrix) -> bool:
        return self.policy.keeps(matrix, self.supported(matrix, self.device))

    def _as_stored(self, target: Target, value: Tensor) -> Matrix | None:
        """The weight in the dtype of the file, where products of the device read that."""
        if target.index is not None:
            return None
        matrix = DenseMatrix(scaled(value, target))
        return matrix if self.supported(matrix, self.device) else None

    def _copy(self, room: Tensor, target: Target, value: Tensor) -> None:
        """An embedding keeps the dtype of the file, too."""
        embedding = self.embeddings.get(target.name)
        shorter = value.dtype != room.dtype and is_one(target.scale)
        if embedding and shorter and self.supported(DenseMatrix(value), self.device):
            # a product takes over what is tied, and it makes its own copy
            taken_over = embedding is self.tied and self.head_is_whole
            embedding.store(value if taken_over else value.clone())
        else:
            super()._copy(room, target, value)

    def finish(self) -> None:
        super().finish()
        if self.tied is None:
            return
        # lm_head is the embedding, so it was never put
        weight, (head, leaf) = self.tied.weight.detach(), self.layers[HEAD]
        matrix = self.tied_matrix or (self.policy.rounds(HEAD, weight) if self.rounds else None)
        if matrix is None:
            matrix = self._as_stored(Target(HEAD), weight)
        if matrix is not None:
            head.hold(leaf, matrix)


def scaled(value: Tensor, target: Target) -> Tensor:
    if not is_one(target.scale):
        scale = target.scale
        value = value.float() * (scale.to(value.device) if isinstance(scale, Tensor) else scale)
    return value.float() + target.shift if target.shift else value


def is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def least_bytes(model: nn.Module, policy: Policy, stored: float) -> int:
    """What the weights take at least: a matrix that is rounded its bits, without scales; all else
    the shorter of the model's dtype and the file's.

    model: on any device. stored: bytes of an element in the files, on average.
    """
    holds = {
        f"{name}.{leaf}" if name else leaf
        for name, layer in matrix_layers(model)
        if layer.may_hold
        for leaf in layer.matrix_names
    }
    total = 0.0
    for name, weight in model.named_parameters():
        size = min(stored, weight.element_size())
        if name in holds and weight.ndim > 1 and (bits := policy.bits(name, weight)):
            size = min(size, bits / 8)
        total += weight.numel() * size
    return int(total)


def refuse_too_large(
    model: nn.Module, path: str, policy: Policy, stored: float, free: int, on_host: bool
) -> None:
    """free: bytes that may be taken.

    Raises: ConfigError with what would fit, if the weights cannot.
    """
    needed = least_bytes(model, policy, stored)
    if needed <= free:
        return
    sizes = {
        mode: least_bytes(model, Policy(mode), stored) for mode in (ON_HOST if on_host else ON_GPU)
    }
    shorter = [
        f"--quantization {mode} takes {size / 1e9:.1f} GB"
        for mode, size in sizes.items()
        if size <= free
    ]
    remedy = " or ".join(shorter) or "no --quantization makes it small enough: take a smaller model"
    where = "memory" if on_host else "GPU memory"
    raise ConfigError(
        [
            f"{path}: its weights take at least {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
            f"{where} are free; {remedy}, or divide it by --tp-size over more devices"
        ]
    )
