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
    """A list as a tensor on the device; from memory that is not pinned, the copy would wait."""
    on_gpu = torch.device(device).type == "cuda"
    host = torch.tensor(values, dtype=dtype, pin_memory=on_gpu)
    return host.to(device, non_blocking=True) if on_gpu else host


def to_host(made: Tensor) -> Tensor:
    """A copy that can be read once the device has got to it."""
    if made.device.type == "cpu":
        return made
    host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
    return host.copy_(made, non_blocking=True)
