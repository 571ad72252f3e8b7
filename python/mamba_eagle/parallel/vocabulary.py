"""Logits whose vocabulary is split over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.shard import Shard


def whole_logits(own: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Each rank's columns [n, own V], from all ranks: [n, V]."""
    spans = [Shard(rank, group.size).span(vocab_size) for rank in range(group.size)]
    missing = max(span.size for span in spans) - own.shape[1]
    parts = group.gather(F.pad(own, (0, missing)).contiguous())
    return torch.cat([part[:, : span.size] for part, span in zip(parts, spans)], dim=1)
