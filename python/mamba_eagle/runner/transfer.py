"""Between host and device, without waiting: from and to pinned memory, in the order of the stream.

On a CPU both directions are the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence, dtype: torch.dtype = torch.int64, device: torch.device | str = "cpu"
) -> Tensor:
    """A list as a tensor on the device."""
    host = host_tensor(values, dtype, device)
    return host.to(device, non_blocking=True)


def host_tensor(
    values: Sequence, dtype: torch.dtype = torch.int64, device: torch.device | str = "cpu"
) -> Tensor:
    """A list as a tensor that is on its way to the device; from memory that is not pinned, the copy
    would wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


def to_host(made: Tensor) -> Tensor:
    """A copy that can be read once the device has got to it."""
    if made.device.type == "cpu":
        return made
    host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
    return host.copy_(made, non_blocking=True)
