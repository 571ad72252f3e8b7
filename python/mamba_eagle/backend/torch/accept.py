"""Room for accepted nodes."""

import torch

from mamba_eagle.tree.accept import Truncated


def empty_truncated(b: int, max_depth: int, device: torch.device) -> Truncated:
    """Uninitialized tensors for b paths of up to max_depth + 1 nodes, for kernels to write to."""
    return Truncated(
        torch.empty(b, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(b, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.bool, device=device),
    )
