"""torch's own sums over symmetric memory: each rank reads the parts of all others (one shot), or
adds up a slice for all of them (two shots)."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.parallel.sums.shared_memory import SharedMemory, members, share, share_problem
from mamba_eagle.parallel.sums.site import JoinedSum, Site

# numbers of ranks for which torch's kernels add in the order of the ranks; with others each rank
# begins with its own part, and the ranks have different bits
RANKS = (2, 4, 8)
DTYPES = (torch.bfloat16, torch.float32)


class OneShot(JoinedSum):
    """For few tokens."""

    name = "symmetric one shot"

    def __init__(self, memory: SharedMemory, site: Site) -> None:
        self.memory = memory
        self.room = memory.own.view(site.tokens, site.size)
        self.group_name = members(site).torchs.group_name

    @classmethod
    def why_not(cls, site: Site) -> str:
        if site.group.size not in RANKS:
            return f"torch adds in the order of the ranks for {RANKS} of them only"
        if site.dtype not in DTYPES:
            return f"torch has no kernel for {site.dtype}"
        return share_problem(site)

    @classmethod
    def join(cls, site: Site) -> OneShot:
        return cls(share(site, site.tokens * site.size, site.dtype), site)

    def sum(self, x: Tensor) -> Tensor:
        room = self.room[: len(x)]  # the kernel copies x there first
        return torch.ops.symm_mem.one_shot_all_reduce_copy(room, x, "sum", self.group_name)


class TwoShots(OneShot):
    """For many tokens: two thirds of the traffic with 4 ranks, the same with 2."""

    name = "symmetric two shots"

    def sum(self, x: Tensor) -> Tensor:
        room = self.room[: len(x)]
        room.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(room, "sum", self.group_name, x)
