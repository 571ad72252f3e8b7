"""Large tensors of zeros whose memory is taken when it is first used.

``torch.zeros`` writes its zeros. On a CPU pools are larger than most requests need them, and the
memory that the system hands out is zero already, so nothing is written: a start is shorter by the
time that the pools' pages take, and a process holds the pages that were used.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

MIN_BYTES = 1 << 20  # less is not worth a system call
ALIGNMENT = 64  # bytes, a cache line, as torch aligns its own: sums that cross one are slower


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``, for tensors that live as long as the process."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < MIN_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)
