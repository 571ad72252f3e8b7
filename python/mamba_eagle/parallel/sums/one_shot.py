"""Our own kernel over symmetric memory: parts pushed to all ranks, their sum, the residual stream
and its norm at once (kernels/one_shot_sum)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from mamba_eagle.parallel.groups import Site
from mamba_eagle.parallel.sum_table import FusedSum, Normed
from mamba_eagle.parallel.sums.shared_memory import (
    JoinedSum,
    SharedMemory,
    members,
    share,
    share_problem,
)

MAX_PROGRAMS = 128  # of a launch, each on a processor of its own


class OrderedSum(JoinedSum):
    """Sums in the order of the ranks, in float32, rounded once: bits of ``sum_in_order``, for any
    number of tokens."""

    name = "pushed, in order"

    def __init__(self, parts: SharedMemory, flags: SharedMemory, site: Site, programs: int) -> None:
        """programs: of a launch at most, the same on all ranks."""
        # Triton is there on GPUs only
        from mamba_eagle.kernels.one_shot_sum.triton import Peers, pushed_sum, pushed_sum_norm

        group = site.group
        clock = torch.zeros(2, dtype=torch.int64, device=group.device)
        self.parts, self.flags = parts, flags
        self.peers = Peers(
            parts.addresses, flags.addresses, clock, group.rank, group.size, site.tokens, programs
        )
        self._sum, self._sum_norm = pushed_sum, pushed_sum_norm

    @classmethod
    def why_not(cls, site: Site) -> str:
        return share_problem(site.group) if find_spec("triton") else "triton is not installed"

    @classmethod
    def join(cls, site: Site) -> OrderedSum:
        group = members(site.group)
        processors = torch.cuda.get_device_properties(group.device).multi_processor_count
        (programs,) = group.smallest([min(MAX_PROGRAMS, processors)])
        # a flag per sender and program; parts twice, since calls take turns
        flags = share(group, group.size * programs, torch.int64)
        parts = share(group, 2 * group.size * site.tokens * site.size, site.dtype)
        return cls(parts, flags, site, programs)

    def sum(self, x: Tensor) -> Tensor:
        return self._sum(x, self.peers)


class PushedSum(OrderedSum, FusedSum):
    """Also with the norm, which reads a sum before it is rounded."""

    name = "pushed"

    def sum_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        return Normed(self._sum_norm(stream, added, weight, eps, self.peers), stream)
