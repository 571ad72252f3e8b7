"""The processes of a run: one, or as many as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=24)  # one process may have much longer answers to make than another


class World(NamedTuple):
    """Process ``rank`` of ``size``; each has a device of its own."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device) -> World:
        """By torchrun's environment variables; without them this process is alone.

        Args: device: cpu, or cuda for the GPU of this process's local rank.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=PATIENCE)
        return cls(rank, size, device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Prints, in one process."""
        if self.is_first:
            print(text, flush=True)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def add_up(self, values: Tensor) -> Tensor:
        """``values``, summed over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def add_up_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Each gradient becomes the sum over the processes; one message for all of them."""
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
