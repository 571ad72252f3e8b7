"""What a backend needs to know to run a network's part of a step in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from mamba_eagle.backend.pending import PendingEntries
from mamba_eagle.backend.pools import KVPool, RequestTable
from mamba_eagle.core import TreeShape
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.models.base import CausalLM
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class Network(NamedTuple):
    """A model that is ``logits(norm(layers(embedding · scale))) · logits_scale``, and whose
    features are what ``logits`` reads; ``rotary`` makes its angles. The layers of a head read
    ``entry([embedding · scale; feature])``; its output is the feature of the entry after it."""

    embedding: Embedding
    scale: float
    layers: Sequence[nn.Module]
    norm: RMSNorm
    logits: Linear
    logits_scale: float = 1.0
    entry: Linear | None = None  # [2 · size] -> [size]
    rotary: Rotary | None = None


def network_of(model: CausalLM) -> Network | None:
    """None: the model does more than that, or is one of several stages."""
    whole = model.config.is_first_stage and model.config.is_last_stage
    if not whole or model.reads_embeddings or model.tap_layers:
        return None
    own, scale = model.parts, model.embedding_scale
    return Network(
        own.embedding, scale, own.layers, own.norm, model.lm_head, model.logits_scale,
        rotary=model.rotary,
    )  # fmt: skip


class Verified(NamedTuple):
    """The target's outputs for the trees of a batch."""

    tree: Tree
    layout: Any  # as returned by the state scheme's ``begin``
    positions: Tensor  # [b, T] int64, of the nodes
    features: Tensor  # [b, T, F]
    logits: Tensor  # [b, T, V], the model's logits_dtype
    program: StepProgram | None = None  # what made them, and commits them

    def first(self, b: int) -> Verified:
        """The outputs for the first ``b`` requests; the layout still covers all."""
        tree = Tree(*(part[:b] for part in self.tree))
        parts = (self.positions, self.features, self.logits)
        positions, features, logits = (part[:b] for part in parts)
        return Verified(tree, self.layout, positions, features, logits)


class Committed(NamedTuple):
    """What a decode step has changed."""

    accepted: Truncated
    folded: Tensor  # [b] int64, positions of the states in the requests' state slots

    def first(self, b: int) -> Committed:
        """The same for the first ``b`` requests."""
        return Committed(Truncated(*(part[:b] for part in self.accepted)), self.folded[:b])


class StepProgram(Protocol):
    """Verifies trees and commits what is accepted, with the results of the scheme, the layers and
    ``Backend.accept_tokens``. slots [b] request slots; kv_slots [b, T] of the nodes."""

    def verify(self, slots: Tensor, kv_slots: Tensor, tree: Tree) -> Verified:
        """Valid until the next step."""

    def commit(
        self, slots: Tensor, kv_slots: Tensor, verified: Verified, target: Tensor, max_depth: int
    ) -> Committed:
        """After ``verify`` of the same trees; target [b, T]."""


class DraftPools(NamedTuple):
    """Where a drafter keeps what it knows of its requests."""

    table: RequestTable
    entries: PendingEntries
    kv: KVPool
    max_lanes: int  # KV slots for the lanes of a request, after the pool's padding slot
    shape: TreeShape  # the largest
    min_probability: np.ndarray  # [1] float64, of a node that is kept (``likely_nodes``)


# ``f(slots, shape, longest)``, for requests without noise and grammars: processes all pending
# entries of the requests in ``slots`` [b] int64, ``longest`` per request at most, and returns a
# tree of ``shape`` for each, with fewer nodes where the drafter doubts that more would be accepted.
GreedyDrafting = Callable[[Tensor, TreeShape, int], Tree]
