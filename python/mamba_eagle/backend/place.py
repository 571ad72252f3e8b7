"""Where a runner's tensors live, and how numbers get there and back without waiting.

On a CPU both directions are the tensors themselves. On a GPU they go through pinned memory, in the
order of the stream, and can be read once a ``Timestamp`` recorded after them is reached.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Timestamp:
    """A point in the device's work; on a CPU, now."""

    event: torch.cuda.Event | None = None

    def __init__(self) -> None:
        self.time = time.perf_counter()

    @property
    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Until it is reached."""

    def until(self, later: Timestamp) -> float:
        """Seconds; both have been reached."""
        return later.time - self.time


class CudaTimestamp(Timestamp):
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
    """Of the device, the weights being there already. Bytes."""

    free: int
    total: int | None  # None: the system does not say
    name: str


class Place(ABC):
    """A device as the runner sees it."""

    device: torch.device
    on_host: bool  # reading a tensor costs nothing and waits for nothing
    overlaps: bool  # a step is launched before the last one's results are read
    padding_slots: int  # request slots and state slots that nobody owns: they fill up a batch
    prompt_tokens: int  # of a step: as many as keep it busy, and no more, since running requests
    # wait for them
    max_kv_slots: int  # more are not allocated unless a flag asks for them
    max_cached_states: int | None  # the same of states beside those of running requests

    def to_device(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        """A list as a tensor on the device."""
        return self.host_tensor(values, dtype).to(self.device, non_blocking=True)

    @abstractmethod
    def host_tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        """A list as a tensor that can be copied to the device without waiting."""

    @abstractmethod
    def host_buffer(self, size: int) -> Tensor:
        """[size] uint8 on the host, which can be copied to the device without waiting."""

    @abstractmethod
    def to_host(self, made: Tensor) -> Tensor:
        """A copy that can be read once the device has got to it."""

    @abstractmethod
    def timestamp(self) -> Timestamp:
        """The end of what was launched so far."""

    @abstractmethod
    def memory(self) -> FreeMemory: ...


class Host(Place):
    """The CPU and its memory."""

    device = torch.device("cpu")
    on_host = True
    overlaps = False
    padding_slots = 0
    prompt_tokens = 1024
    max_kv_slots = 65536
    max_cached_states = 192

    def host_tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def to_host(self, made: Tensor) -> Tensor:
        return made

    def timestamp(self) -> Timestamp:
        return Timestamp()

    def memory(self) -> FreeMemory:
        try:
            with open("/proc/meminfo") as file:
                sizes = dict(line.split(":", 1) for line in file)
            return FreeMemory(int(sizes["MemAvailable"].split()[0]) * 1024, None, "memory")
        except (OSError, KeyError, ValueError):  # where the system does not say: no limit
            return FreeMemory(1 << 62, None, "memory")


class Cuda(Place):
    """A CUDA GPU."""

    on_host = False
    overlaps = True
    padding_slots = 1
    prompt_tokens = 8192
    max_kv_slots = 2_000_000
    max_cached_states = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        # from memory that is not pinned the copy would wait
        return torch.tensor(values, dtype=dtype, pin_memory=True)

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def to_host(self, made: Tensor) -> Tensor:
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        return host.copy_(made, non_blocking=True)

    def timestamp(self) -> Timestamp:
        return CudaTimestamp()

    def memory(self) -> FreeMemory:
        return FreeMemory(*torch.cuda.mem_get_info(self.device), "GPU memory")
