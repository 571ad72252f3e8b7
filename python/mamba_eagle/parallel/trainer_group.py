"""A group of torch.distributed whose rank 0 is a trainer, which broadcasts weights."""

import datetime
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from mamba_eagle.message import JoinGroup

POLL_SECONDS = 1e-4


class TrainerGroup:
    """Of this process; beside the group of the ranks that serve, and without one as well.

    It is made as trainers make theirs, by torch's own function for a group whose members are not
    those of ``init_process_group``: sides that are made in different ways do not find each other.
    """

    def __init__(self, asked: JoinGroup, number: int, device: torch.device) -> None:
        """Returns once all members are there. number: of this rank.

        Raises: TimeoutError, RuntimeError, ValueError
        """
        self.asked, self.device = asked, device.index or 0
        rank, timeout = asked.first_rank + number, datetime.timedelta(seconds=asked.seconds)
        if asked.backend == "nccl":
            torch.cuda.set_device(self.device)  # of this thread
        address = f"{asked.host}:{asked.port}"
        try:
            found = dist.rendezvous(f"tcp://{address}", rank, asked.size, timeout=timeout)
            store, _, _ = next(found)
            store.set_timeout(timeout)
            self.group, _ = c10d._new_process_group_helper(
                asked.size,
                rank,
                [],
                asked.backend,
                dist.PrefixStore(asked.group, store),
                group_name=c10d.GroupName(asked.group),
                # NCCL's watchdog would end the process, so ``receive`` gives up before
                timeout=timeout * (2 if asked.backend == "nccl" else 1),
            )
            # torch expects it of a group that it forgets
            c10d._world.pg_group_ranks[self.group] = {rank: rank for rank in range(asked.size)}
        except dist.DistError as error:
            raise TimeoutError(
                f"group {asked.group!r}: {asked.size} members did not meet at {address} within "
                f"{asked.seconds:g} s: start the trainer's side at the same time, with the same "
                f"address and world_size ({error})"
            ) from error

    def receive(self, room: Tensor) -> Tensor:
        """The trainer's next broadcast, which fills ``room``.

        Raises: TimeoutError, RuntimeError
        """
        if self.asked.backend == "nccl":
            torch.cuda.set_device(self.device)
        work = self.group.broadcast(room, 0)
        deadline = time.monotonic() + self.asked.seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"group {self.asked.group!r}: the trainer sent nothing for "
                    f"{self.asked.seconds:g} s"
                )
            time.sleep(POLL_SECONDS)
        work.wait()
        return room

    def leave(self) -> None:
        """Whatever is under way; the other members get an error."""
        c10d._abort_process_group(self.group)
        del self.group  # closes gloo's connections
