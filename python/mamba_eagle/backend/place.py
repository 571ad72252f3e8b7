"""The device of a runner's tensors, and copies to and from the host that do not wait.

On a CPU no copies are made. On a GPU, copies go through pinned memory in stream order, and the host
may read them once a ``Timestamp`` recorded after them is reached.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Numbers: TypeAlias = "Sequence[Any] | np.ndarray"  # numbers, or nested sequences of them


class Timestamp:
    """A point in the device's sequence of work; on a CPU, the current time."""

    event: torch.cuda.Event | None = None

    def __init__(self) -> None:
        self.time = time.perf_counter()

    @property
    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Block until it is reached."""

    def until(self, later: Timestamp) -> float:
        """Seconds from this timestamp to ``later``; both must have been reached."""
        return later.time - self.time


class CudaTimestamp(Timestamp):
    """A CUDA event, recorded in the current stream."""

    event: torch.cuda.Event

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()
        super().__init__()

    @property
    def reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def until(self, later: Timestamp) -> float:
        assert later.event is not None
        return self.event.elapsed_time(later.event) / 1e3


class FreeMemory(NamedTuple):
    """Memory of the device, in bytes."""

    free: int
    total: int | None  # None: unknown
    name: str


class Place(ABC):
    """A device, with its memory and the limits that suit it.

    Numbers go to tables by ``fill_`` and ``index_fill_``: assigned, they would be copied from
    memory that is not pinned, and the host would wait until the device has done all its work.
    """

    device: torch.device
    on_host: bool  # the host reads tensors directly, without copies
    overlaps: bool  # whether a step is launched before the previous one's results are read
    padding_slots: int  # request slots and state slots for padding, which no request ever gets
    prompt_tokens: int  # most prompt tokens per step: enough to keep the device busy, but no more,
    # since running requests wait for them
    journals_per_state: float  # saved journals for each state slot, unless a flag sets their number
    bytes_per_sum: int  # of weights: what is read in the time that ranks take for a sum of few rows
    max_kv_slots: int  # upper limit of KV slots unless a flag sets their number
    max_cached_states: int | None  # the same for state slots beyond those of running requests

    def to_device(self, values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
        """``values`` as a tensor on the device."""
        return self.host_tensor(values, dtype).to(self.device, non_blocking=True)

    @abstractmethod
    def host_tensor(self, values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
        """``values`` as a tensor on the host that can be copied to the device without waiting."""

    @abstractmethod
    def host_buffer(self, size: int) -> Tensor:
        """[size] uint8 on the host, which can be copied to the device without waiting."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host; readable once a timestamp that is recorded later is reached."""

    @abstractmethod
    def timestamp(self) -> Timestamp:
        """The point after all work launched so far."""

    @abstractmethod
    def memory(self) -> FreeMemory:
        """Free and total memory now."""


class Host(Place):
    """The CPU and its memory."""

    device = torch.device("cpu")
    on_host = True
    overlaps = False
    padding_slots = 0
    prompt_tokens = 1024
    # What a finished request leaves of both. At 9B sizes a quarter of the states' memory.
    journals_per_state = 0.5
    bytes_per_sum = 4_000_000  # gloo takes 0.3 to 1 ms, in which a core reads 3 to 10 MB
    max_kv_slots = 65536
    max_cached_states = 192

    def host_tensor(self, values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    to_device = host_tensor

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def timestamp(self) -> Timestamp:
        return Timestamp()

    def memory(self, container: Path = Path("/sys/fs/cgroup")) -> FreeMemory:
        """Within a container, no more than its limit leaves beside what cannot be dropped."""
        free = 1 << 62  # unknown on this system: no limit
        with suppress(OSError, KeyError, ValueError):
            with open("/proc/meminfo") as file:
                sizes = dict(line.split(":", 1) for line in file)
            free = int(sizes["MemAvailable"].split()[0]) * 1024
        with suppress(OSError, KeyError, ValueError):  # "max": no limit
            left = int((container / "memory.max").read_text())
            left -= int((container / "memory.current").read_text())
            parts = dict(map(str.split, (container / "memory.stat").read_text().splitlines()))
            left += int(parts["active_file"]) + int(parts["inactive_file"])  # files' cache
            free = max(0, min(free, left))
        return FreeMemory(free, None, "memory")


class Cuda(Place):
    """A CUDA GPU."""

    on_host = False
    overlaps = True
    padding_slots = 1
    prompt_tokens = 8192
    # Their memory holds fewer states, and keeping rows makes passes over prompts longer: in chats
    # on an H200 as much was cached, and the first token took 210 ms instead of 107.
    journals_per_state = 0.0
    bytes_per_sum = 40_000_000  # NCCL takes 8.4 to 10 µs on two H200s, which copy 4.3 TB/s
    max_kv_slots = 2_000_000
    max_cached_states = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_tensor(self, values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
        # a copy from memory that is not pinned would wait; arrays cannot be made pinned at once. Of
        # a list of 1,000 numbers torch makes a tensor in 100 µs, numpy an array in 30
        return torch.tensor(np.asarray(values), dtype=dtype).pin_memory()

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def timestamp(self) -> Timestamp:
        return CudaTimestamp()

    def memory(self) -> FreeMemory:
        return FreeMemory(*torch.cuda.mem_get_info(self.device), "GPU memory")


MIN_BYTES = 1 << 20  # less is not worth a system call
ALIGNMENT = 64  # bytes, a cache line, as torch aligns its own: sums that cross one are slower


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``, for large tensors that live as long as the process: their memory is taken
    when it is first used.

    ``torch.zeros`` writes its zeros. On a CPU pools are larger than most requests need them, and
    the memory that the system hands out is zero already, so nothing is written: a start is shorter
    by the time that the pools' pages take, and a process holds the pages that were used.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < MIN_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)
