"""How recurrent state survives speculation: the interface of all state schemes.

A step calls ``begin`` once, ``verify`` in each recurrent layer, and ``accept`` once. ``begin``
returns a layout that is passed to the other two, so a step is a value and two of them may be in
flight. ``start`` and ``finish`` bracket the decoding of a request: prefill leaves the state after
the prompt in the request's state slot, and ``finish`` brings it to a position of the caller's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class KeptRows(NamedTuple):
    """The tensors of saved journals (journals.py), the last journal slot being for padding."""

    conv_in: Tensor  # [layers, journal slots, C rows, conv_dim]
    gates: Tensor  # [layers, journal slots, C, gate_size] float32
    feature: Tensor  # [journal slots, C, F]
    trail: Tensor  # [requests] int64: the journal slot of each request's output
    processed: Tensor  # [requests] int64, as in the request table


class StateScheme(ABC):
    """Recurrent state of running requests, in all recurrent layers.

    ``begin`` and ``lane_layout`` return a *layout*, which only the same scheme reads; attention
    gets its ancestors from ``ancestor_bits``.

    Shapes: b or n requests, T tree nodes, F feature size. Slots and counts are int64;
    ``slots`` are request slots.
    """

    on_device = False  # whether no method waits for the host, so that graphs can repeat a step
    has_journal = False  # whether accepted tokens wait in rows for a fold

    @abstractmethod
    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        """The prompts of ``slots`` [n] are finished, and ``state_slots`` [n] hold the states after
        all processed tokens."""

    @abstractmethod
    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """The requests in ``slots`` [n] leave: advance the states in ``state_slots`` [n] by the
        first ``keep`` [n] tokens of the journals, and store the history with them."""

    @abstractmethod
    def begin(self, slots: Tensor, tree: Tree) -> Any:
        """Prepare to verify one tree per request in ``slots`` [b]. Returns the layout."""

    def gates_of(self, layer: Any, raw: Tensor) -> Tensor:
        """What ``verify`` takes of a delta rule's raw gates."""
        return raw

    @abstractmethod
    def verify(self, layer: Any, layout: Any, channels: Tensor, raw: Tensor) -> Tensor:
        """Convolution and recurrence of all nodes in one layer, a Recurrent: channels
        [b*T, conv_dim] before the convolution, raw gates [b*T, ·] -> y [b*T, inner_size]."""

    @abstractmethod
    def accept(self, layout: Any, accepted: Truncated, features: Tensor) -> None:
        """Make the accepted nodes part of the sequences. features: [b, T, F], of the nodes; the one
        of the last token is stored with the state."""

    @abstractmethod
    def folded(self, slots: Tensor) -> Tensor:
        """Position of each request's state: slots [b] -> [b] int64."""

    def run(
        self, layers: Sequence[nn.Module], hidden: Tensor, ctx: Any, layout: Any
    ) -> Tensor | None:
        """All nodes through some layers in a row, where the backend has something better than
        calling one after the other; else None. ctx: what they would be called with."""
        return None

    def ancestor_bits(self, layout: Any) -> Tensor | None:
        """``TreeLayout.ancestors``, [b, T] int64, if the backend's attention reads bits; else
        None."""
        return None

    def journal_len(self, slots: Tensor) -> Tensor:
        """Rows in each journal: slots [b] -> [b] int64. Only for schemes with journals."""
        raise AssertionError("the scheme has no journals")

    def accepted_inputs(self, slots: Tensor, accepted: Truncated) -> tuple[Tensor, Tensor]:
        """What the D tokens accepted last fed into the recurrence: slots [b] -> raw convolution
        inputs [layers, b, D, conv_dim] and gates [layers, b, D, gate_size], arbitrary past
        ``count``. Only with recurrent layers."""
        raise AssertionError("the scheme has no recurrent layers")

    def keep_rows(
        self, slots: Tensor, accepted: Truncated, features: Tensor, kept: KeptRows
    ) -> None:
        """Copy the rows of the tokens that a step has just accepted to the journal slots of their
        requests. features: [b, T, F], of the nodes. ``processed`` includes these tokens already."""
        nodes, count = accepted.nodes, accepted.count
        offsets = torch.arange(nodes.shape[1], device=slots.device)
        positions = (kept.processed[slots] - count)[:, None] + offsets
        journals = torch.where(
            offsets < count[:, None], kept.trail[slots][:, None], kept.feature.shape[0] - 1
        )
        rows = positions % kept.feature.shape[1]
        if kept.conv_in.shape[0]:
            conv_in, gates = self.accepted_inputs(slots, accepted)
            kept.conv_in[:, journals, rows] = conv_in
            kept.gates[:, journals, rows] = gates
        at = nodes[..., None].expand(-1, -1, features.shape[2])
        kept.feature[journals, rows] = features.gather(1, at).to(kept.feature.dtype)

    def stem(self, slots: Tensor, lanes: int) -> TreeLayout | None:
        """The point where lanes branch off: a layout of tensors for the requests in ``slots`` [b],
        with ``lanes`` free rows per request and without parents. None if the scheme has no
        journals."""
        return None

    def lane_layout(self, lanes: TreeLayout) -> Any:
        """The scheme's own layout for lanes, each a tree with one node. lanes: a layout of
        tensors. Only for schemes whose ``stem`` is not None."""
        raise AssertionError("the scheme has no stem")

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the scheme's own buffers, without the state slots."""


class SchemeSize(NamedTuple):
    """Sizes of a scheme's buffers."""

    layers: int  # recurrent layers
    features: int  # elements per token's feature
    rows: int  # W: per request
    nodes: int  # most nodes per step
    accepts: int  # most tokens accepted per step
    spare: int = 0  # rows that a step leaves free for others (drafted lanes)


class StatelessScheme(StateScheme):
    """Of models without recurrent layers: keeps only the feature of the last token, which a draft
    head needs."""

    on_device = True

    def __init__(
        self, table: RequestTable, pool: StatePool, pack: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """pack: turns ancestors [b, T, T] bool into bits [b, T, 1], if attention reads bits."""
        self.table, self.pool, self.pack = table, pool, pack

    def start(self, slots: Tensor, state_slots: Tensor) -> None: ...

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None: ...

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        return TreeLayout(
            slots=slots,
            state_slots=self.table.state_slot[slots],
            journal=None,
            journal_len=None,
            rows=None,
            parents=tree.parents,
            ancestors=None if self.pack is None else self.pack(tree.ancestors)[..., 0],
            tail=None,
        )

    def verify(self, layer: Any, layout: TreeLayout, channels: Tensor, raw: Tensor) -> Tensor:
        raise AssertionError("the model has no recurrent layer")

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        if features.shape[2]:  # else a drafter without a carry
            self.pool.keep_features(layout.state_slots, accepted, features)

    def ancestor_bits(self, layout: TreeLayout) -> Tensor | None:
        return layout.ancestors

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    @property
    def num_bytes(self) -> int:
        return 0
