"""What the runner asks of a drafter. A new drafter is one new file and one line in __init__."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from mamba_eagle.core import TreeShape
from mamba_eagle.message import PrefillItem
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.tree import Tree, single_node_tree


class Drafter(ABC):
    """Proposes a tree for each request and is told what became of the sequence.

    Its caches follow the target's: entries of a token stand under that token's KV slot in a pool
    of its own, so a prefix the target finds in the radix cache is there for the drafter too.
    """

    @abstractmethod
    def observe_prefill(
        self, item: PrefillItem, tokens: Tensor, hidden: Tensor, before: Tensor
    ) -> None:
        """Prompt tokens [n] were run; hidden [n, hidden_size] is what the target made of them,
        before [hidden_size] its hidden state of the token ahead of them (zeros at position 0)."""

    @abstractmethod
    def observe_first_token(self, slot: int, token: Tensor, hidden: Tensor) -> None:
        """The prompt is over: ``token`` [] was sampled from ``hidden`` [hidden_size]."""

    @abstractmethod
    def observe_accepted(self, slots: Tensor, accepted: Truncated, hidden: Tensor) -> None:
        """A verify step has ended. hidden [b, T, hidden_size]: the target's, of all nodes."""

    @abstractmethod
    def propose(self, slots: Tensor, shape: TreeShape) -> Tree:
        """A tree of ``shape`` for each request in ``slots`` [b], rooted at its last token."""

    @abstractmethod
    def finish(self, slot: int) -> None:
        """The request leaves and its prefix may be reused: complete the entries of all tokens
        that were run."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of weights and caches."""


class NoDrafter(Drafter):
    """Plain decoding: the tree is its root."""

    def __init__(self, last_token: Tensor) -> None:
        self.last_token = last_token

    def observe_prefill(
        self, item: PrefillItem, tokens: Tensor, hidden: Tensor, before: Tensor
    ) -> None: ...

    def observe_first_token(self, slot: int, token: Tensor, hidden: Tensor) -> None: ...

    def observe_accepted(self, slots: Tensor, accepted: Truncated, hidden: Tensor) -> None: ...

    def finish(self, slot: int) -> None: ...

    def propose(self, slots: Tensor, shape: TreeShape) -> Tree:
        return single_node_tree(self.last_token[slots])

    @property
    def num_bytes(self) -> int:
        return 0
