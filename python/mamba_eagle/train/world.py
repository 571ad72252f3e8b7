"""The processes of a training run: one, or as many as torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(hours=24)  # some processes may need much longer to generate their answers


class World(NamedTuple):
    """This is process ``rank`` of ``size``; each process has a device of its own."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device) -> World:
        """Joins the processes that torchrun's environment variables describe; without them, this
        process is alone.

        Args:
            device: cpu, or cuda for the GPU of this process's local rank.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        return cls(rank, size, device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def log(self, text: str) -> None:
        """Prints ``text`` in the first process."""
        if self.is_first:
            print(text, flush=True)

    def wait(self) -> None:
        """Waits until all processes have called it."""
        if self.size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Sums ``values`` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces each gradient by its sum over all processes, in a single message."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
