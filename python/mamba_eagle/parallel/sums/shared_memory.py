"""Memory on each GPU that the other ranks of a machine read and write, by torch's symmetric memory.

One allocation per use, made once and never freed while ranks are together; no allocator that others
share. Without NVLink multicast.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from mamba_eagle.parallel.distributed import ProcessGroup
from mamba_eagle.parallel.groups import Group, Site
from mamba_eagle.parallel.sum_table import SumMethod


class JoinedSum(SumMethod):
    """A method that all ranks of a site join together."""

    @classmethod
    @abstractmethod
    def why_not(cls, site: Site) -> str:
        """What is in the way on this rank; "" if nothing is. Compiles what the method needs, and
        exchanges nothing. Raises: anything, which is then in the way."""

    @classmethod
    @abstractmethod
    def join(cls, site: Site) -> JoinedSum:
        """The method, on all ranks at once. Raises: anything."""


# Process groups whose members torch's symmetric memory knows: by name, until the process ends.
# Names start over when ranks meet again, so a later group of the same name would be taken for the
# first one, and wait for ranks that are gone.
_known: dict[str, object] = {}


def known_problem(group: torch.distributed.ProcessGroup) -> str:
    """Why torch could not tell this group from an earlier one; "" if it can."""
    if _known.get(group.group_name, group) is group:
        return ""
    return "ranks of this process have shared memory before, and torch remembers those"


class SharedMemory(NamedTuple):
    own: Tensor  # [size], this rank's
    addresses: Tensor  # [ranks] int64, on the device: of each rank's, as this one sees it
    handle: object  # keeps the mapping alive


def members(group: Group) -> ProcessGroup:
    """Raises: TypeError if its ranks are not processes on GPUs of their own."""
    if not isinstance(group, ProcessGroup) or group.device.type != "cuda":
        raise TypeError("ranks must be processes, each with a GPU")
    return group


def share_problem(group: Group) -> str:
    """Why this rank cannot share memory with the others of its group; "" if it can: torch has to
    tell the group from earlier ones, and its GPU to reach those of its machine."""
    processes = members(group)
    if problem := known_problem(processes.torchs):
        return problem
    own = processes.device.index
    for other in range(torch.cuda.device_count()):
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} has no access to the memory of GPU {other}"
    return ""


def share(among: Group, size: int, dtype: torch.dtype) -> SharedMemory:
    """``size`` zeros on each rank, on all of them together.

    Raises: RuntimeError if multicast is on.
    """
    group = members(among)
    own = symmetric_memory.empty(size, dtype=dtype, device=group.device)
    _known[group.torchs.group_name] = group.torchs
    handle = symmetric_memory.rendezvous(own, group.torchs.group_name)
    if handle.multicast_ptr:
        raise RuntimeError("NVLink multicast is on, which TORCH_SYMM_MEM_DISABLE_MULTICAST=1 ends")
    begins = list(handle.buffer_ptrs)
    # torch may have taken it from a larger block, the same part of it on all ranks
    offset = own.data_ptr() - begins[group.rank]
    offsets = group.gather(torch.tensor([offset], device=group.device))
    if not torch.equal(offsets, offsets[:1].expand_as(offsets)):
        raise RuntimeError(f"memory begins at other places on other ranks: {offsets.tolist()}")
    addresses = torch.tensor([begin + offset for begin in begins], device=group.device)
    own.zero_()
    torch.cuda.synchronize(group.device)
    group.smallest([1])  # no rank writes before all have cleared theirs
    return SharedMemory(own, addresses, handle)


log = logging.getLogger("mamba_eagle.parallel")


@contextlib.contextmanager
def ends_within(
    seconds: float,
    what: str,
    leave: Callable[[int], object] = os._exit,
    remedy: str = "--all-reduce nccl",
) -> Iterator[None]:
    """Ends the process if ``what`` takes longer, since a kernel that waits for another rank's for
    ever cannot be given up; the other ranks then end, too. leave: how."""

    def give_up() -> None:
        log.critical(
            "%s have not come to an end within %g s, since ranks wait for each other; start with "
            "%s",
            what,
            seconds,
            remedy,
        )
        leave(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
