"""What trainers send in groups of processes, received beside the steps."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle import message
from mamba_eagle.config import EngineConfig
from mamba_eagle.layers.weights import META, matrix_layers
from mamba_eagle.models.loader import place_of
from mamba_eagle.models.received import add_part, transfer_problems
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.quantization.matrix import Matrix

if TYPE_CHECKING:
    from mamba_eagle.parallel.trainer_group import TrainerGroup

log = logging.getLogger("mamba_eagle.runner")
Checksums = dict[str, str]  # by tensor
ForGroup = message.JoinGroup | message.LeaveGroup | message.TakeTensors


class Member(NamedTuple):
    """What a rank is in every group."""

    number: int
    writes: bool  # what is received, for the ranks of its node
    device: torch.device


class Transfers:
    """Calls of trainers. Each has a thread of its own, which may wait for a trainer that never
    comes, while all else goes on."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.groups: dict[str, TrainerGroup] = {}
        self._busy: set[str] = set()  # groups

    def begin(
        self, asked: message.AskRanks, config: EngineConfig, modules: dict[str, nn.Module]
    ) -> Future[Checksums]:
        """config: with the folders that are served. modules: those with weights."""
        made, task = Future[Checksums](), asked.task
        if isinstance(task, message.SumWeights):
            work = partial(checksums, held_weights(modules))
        else:
            work = partial(self._alone, task, config)
        threading.Thread(target=_finish, args=(made, work), name="transfer", daemon=True).start()
        return made

    def answer(self, asked: message.AskRanks, made: Future[Checksums]) -> message.RankReply:
        """made: of ``begin``, and done."""
        reply = message.RankReply(call_id=asked.call_id, rank=self.member.number)
        try:
            reply.checksums = made.result()
        except Exception as error:
            log.warning("a trainer's call has failed: %s", error)
            reply.problem = str(error) or type(error).__name__
        return reply

    def close(self) -> None:
        while self.groups:
            self.groups.popitem()[1].leave()

    def _alone(self, task: ForGroup, config: EngineConfig) -> Checksums:
        if task.group in self._busy:
            raise ValueError(f"group {task.group!r} is busy: wait for the answer to that call")
        self._busy.add(task.group)
        try:
            if isinstance(task, message.JoinGroup):
                self._join(task)
            elif isinstance(task, message.LeaveGroup):
                self._group(task.group).leave()
                del self.groups[task.group]
            else:
                self._take(task, self._group(task.group), config)
        finally:
            self._busy.remove(task.group)
        return {}

    def _join(self, asked: message.JoinGroup) -> None:
        # takes a while to import, and few servers have a trainer
        from mamba_eagle.parallel.trainer_group import TrainerGroup

        if asked.group in self.groups:
            raise ValueError(f"group {asked.group!r} was joined already: destroy it first")
        self.groups[asked.group] = TrainerGroup(asked, self.member.number, self.member.device)

    def _group(self, name: str) -> TrainerGroup:
        if name not in self.groups:
            raise ValueError(f"group {name!r} was not joined, or has failed: init it first")
        return self.groups[name]

    def _take(self, asked: message.TakeTensors, group: TrainerGroup, config: EngineConfig) -> None:
        kept: dict[str, Tensor] = {}
        try:
            if wrong := take_problems(asked, config):
                raise ValueError("\n  ".join(["what is sent does not fit:", *wrong]))
            for chunk in chunks(asked.tensors, asked.chunk_bytes):
                found = receive(group, chunk, self.member.device)
                if self.member.writes:
                    kept |= found
            if self.member.writes:
                add_part(asked.folder, kept)
        except Exception:
            # the trainer is in the middle of broadcasts, which no one receives now
            self.groups.pop(asked.group).leave()
            raise


def _finish(made: Future[Checksums], work: Callable[[], Checksums]) -> None:
    try:
        made.set_result(work())
    except Exception as error:
        made.set_exception(error)


def take_problems(asked: message.TakeTensors, config: EngineConfig) -> list[str]:
    path = config.speculative_draft_model_path if asked.is_drafter else config.model_path
    if not path or config.load_format == "dummy":
        return ["this server has no files of such weights"]

    def is_unused(name: str) -> bool:
        sizes = read_model_config(config.model_path)
        with torch.device("meta"):
            model = model_class(sizes)(sizes)
        return not asked.is_drafter and place_of(model, name) is None

    return transfer_problems(path, asked.tensors, is_unused)


def chunks(tensors: list[message.TensorInfo], most: int) -> Iterator[list[message.TensorInfo]]:
    """Those that travel together: each alone, or as many as it takes to exceed ``most`` bytes."""
    together: list[message.TensorInfo] = []
    size = 0
    for tensor in tensors:
        together.append(tensor)
        size += num_bytes(tensor)
        if size > most or not most:
            yield together
            together, size = [], 0
    if together:
        yield together


def num_bytes(tensor: message.TensorInfo) -> int:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return prod(tensor.shape) * dtype.itemsize


def receive(
    group: TrainerGroup, chunk: list[message.TensorInfo], device: torch.device
) -> dict[str, Tensor]:
    """By name, on the host."""
    sizes = [num_bytes(tensor) for tensor in chunk]
    room = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    # a tensor alone is sent as what it is: NCCL counts in elements
    alone = getattr(torch, chunk[0].dtype) if len(chunk) == 1 else torch.uint8
    group.receive(room.view(alone))
    found = {}
    for tensor, part in zip(chunk, room.cpu().split(sizes)):
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        found[tensor.name] = part.clone().view(dtype).view(tensor.shape)  # aligned
    return found


def held_weights(modules: dict[str, nn.Module]) -> dict[str, Tensor | Matrix]:
    """As they are held: split, packed, and in few bits where they are."""
    found: dict[str, Tensor | Matrix] = {}
    for kind, module in modules.items():
        for name, weight in module.named_parameters():
            if weight.device != META:
                found[f"{kind}{name}"] = weight.detach()
        for layer, owner in matrix_layers(module):
            for name, matrix in owner.matrices.items():
                found[f"{kind}{layer}.{name}"] = matrix
    return found


def checksums(weights: dict[str, Tensor | Matrix]) -> Checksums:
    return {name: checksum(weight) for name, weight in weights.items()}


def checksum(weight: Tensor | Matrix) -> str:
    """SHA-256 of the bytes, in hexadecimal digits."""
    found = hashlib.sha256()
    parts = {"": weight} if isinstance(weight, Tensor) else weight.tensors()
    # a packed matrix has no tensors of its own
    for tensor in parts.values() or [weight.dequantize()]:
        data = tensor.contiguous().view(-1).view(torch.uint8).cpu()
        found.update(data.numpy().data)
    return found.hexdigest()
