"""Ranks as processes: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch import Tensor

from mamba_eagle.message.ranks import RANK_ENVIRONMENT
from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.meeting import Meeting
from mamba_eagle.parallel.shard import Shard

# A rank that waits longer for the others ends. The watchdog of the server acts earlier, and says
# where they hang; this is for ranks without one.
TIMEOUT = datetime.timedelta(minutes=10)


# its name in newer versions of torch, and in older ones
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup(Group):
    """torch.distributed's default group of this process."""

    def __init__(self, shard: Shard, device: torch.device, meeting: Meeting) -> None:
        """meeting: where all ranks meet, and they alone."""
        super().__init__(shard, device)
        on_gpu = device.type == "cuda"
        if on_gpu:
            for name, value in RANK_ENVIRONMENT.items():
                found = os.environ.get(name)
                assert found == value, f"{name}={found}: it must be {value} when a rank starts"
            torch.cuda.set_device(device)
        meeting.name_interface()
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=meeting.store(shard.rank, shard.size, TIMEOUT),
            rank=shard.rank,
            world_size=shard.size,
            timeout=TIMEOUT,
            device_id=device if on_gpu else None,
        )
        # The first operation makes the connections, which no captured graph could.
        self.sum(torch.zeros(1, device=device))

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def _max(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def _gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, *x.shape)
        all_gather(whole.view(-1), x.view(-1))
        return whole

    def _from_first(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        dist.destroy_process_group()
