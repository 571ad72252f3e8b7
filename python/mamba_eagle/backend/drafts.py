"""What a backend needs to know to draft for greedy requests in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from mamba_eagle.backend.pending import PendingEntries
from mamba_eagle.backend.pools import KVPool, RequestTable
from mamba_eagle.core import TreeShape
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.tree.tree import Tree


class HeadParts(NamedTuple):
    """A network that is ``norm(layers(entry([embedding · scale; feature])))``, whose output is the
    feature of the entry after it, and of which ``logits`` makes its own logits."""

    embedding: Embedding
    scale: float
    entry: Linear  # [2 · size] -> [size]
    layers: Sequence[nn.Module]
    norm: RMSNorm
    logits: Linear


class DraftPools(NamedTuple):
    """Where a drafter keeps what it knows of its requests."""

    table: RequestTable
    entries: PendingEntries
    kv: KVPool
    max_lanes: int  # KV slots for the lanes of a request, behind the pool's padding slot
    shape: TreeShape  # the largest
    min_probability: np.ndarray  # [1] float64, below which chains end (``Candidates.doubts``)


class GreedyDrafts(Protocol):
    """Drafts trees for requests without noise and grammars."""

    def trees(self, slots: Tensor, shape: TreeShape, longest: int) -> Tree:
        """Processes all pending entries of the requests in ``slots`` [b] int64, ``longest`` per
        request at most, and returns a tree of ``shape`` for each; chains with fewer nodes where the
        drafter doubts that more would be accepted."""
