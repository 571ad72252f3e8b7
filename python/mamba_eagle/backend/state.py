"""How recurrent state survives speculation: the interface of all state schemes.

A step is ``begin`` (a tree is about to be verified), ``verify`` in each Mamba2 layer, ``accept``;
what ``begin`` returns is handed to the other two, so a step is a value and two of them may be under
way. ``start`` and ``finish`` bracket a request's life: after prefill its state slot holds the state
after the prompt, and at its end it is brought to a position of the caller's choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class StateScheme(ABC):
    """Recurrent state of running requests, in all Mamba2 layers.

    A *layout* is what ``begin`` or ``lane_layout`` returns; only the scheme that made it reads it,
    except for ``TreeLayout.ancestors``, which attention shares.
    """

    on_device = False  # nothing waits for the host, so that a captured graph can repeat a step
    has_journal = False  # accepted tokens wait in rows for a fold

    @abstractmethod
    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        """Prefill has ended: the state slots [n] hold what the requests [n] have processed."""

    @abstractmethod
    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """Move each state ``keep`` [n] tokens along its journal; the requests [n] leave."""

    @abstractmethod
    def begin(self, slots: Tensor, tree: Tree) -> Any:
        """A tree of each request in ``slots`` [b] is about to be verified. Returns its layout."""

    @abstractmethod
    def verify(self, layer: Mamba2Mixer, layout: Any, xbc: Tensor, dt: Tensor) -> Tensor:
        """xbc [b*T, conv_dim] before the convolution, dt [b*T, H] raw -> y [b*T, H*P]."""

    @abstractmethod
    def accept(self, layout: Any, accepted: Truncated, features: Tensor) -> None:
        """Make the accepted nodes part of the sequence. features [b, T, F]: of the nodes, kept
        for the state that will end there."""

    @abstractmethod
    def folded(self, slots: Tensor) -> Tensor:
        """Position of each request's state, [b] int64."""

    def ancestor_bits(self, layout: Any) -> Tensor | None:
        """[b, T] int64, ``TreeLayout.ancestors``, where attention reads bits as well."""
        return None

    def journal_len(self, slots: Tensor) -> Tensor:
        """Rows in each journal, [b] int64; of a scheme that has journals."""
        raise AssertionError("only of a scheme that has journals")

    def stem(self, slots: Tensor, lanes: int) -> TreeLayout | None:
        """Where lanes branch off: a layout of tensors with ``lanes`` free rows per request and no
        parents. None from a scheme without journals."""
        return None

    def lane_layout(self, lanes: TreeLayout) -> Any:
        """The layout of single nodes, each a tree of its own, from ``lanes`` of tensors."""
        raise AssertionError("only of a scheme that has a stem")

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the scheme itself, state slots apart."""


class SchemeSize(NamedTuple):
    """What a recurrent scheme has room for."""

    layers: int
    features: int  # numbers per token feature
    rows: int  # W: per request
    nodes: int  # most nodes per step
    accepts: int  # most tokens accepted per step
    spare: int = 0  # rows that a step leaves free for others (drafted lanes)
