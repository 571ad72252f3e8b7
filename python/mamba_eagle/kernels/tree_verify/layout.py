"""The records that describe a verify step to the kernels: sizes, rows, and one layout of its trees.

Shapes: b requests, T tree nodes, R request slots, W rows per request, M the longest journal, K the
width of the convolution, H heads of P channels, G groups, N state size.

Each request slot has a list of *places* in its buffer of raw convolution inputs, in sequence order:

    places  0 … K-2      K-1 … K-2+W
            history      rows: row r stands at place K-1 + r

``path`` lists the places of the last K-1 tokens before the state, then those of the journal, so the
K-1 nearest ancestors of a tree's root are a slice of it.
"""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# A tensor, or for the CPU's kernels a numpy array of the same memory.
Array: TypeAlias = Any


class Sizes(NamedTuple):
    """Of one Mamba2 layer: H heads of P channels, G groups, N state size."""

    heads: int
    head_dim: int
    groups: int
    state_size: int

    @property
    def constants(self) -> dict[str, int]:
        """As kernels name them."""
        return dict(zip("HPGN", self, strict=True))


class RowBuffers(NamedTuple):
    """The row buffers of all request slots, of one layer or (with a leading dimension) of all."""

    xB: Tensor  # [R, W, H*P + G*N] after convolution and SiLU
    dt: Tensor  # [R, W, H] float32, after softplus and clamp
    log_decay: Tensor  # [R, W, H] float32: L, the sum of dt·A from the state to the row


class TreeLayout(NamedTuple):
    """What every layer reads of a verify step: where the nodes are and what comes before them.

    A node's parent comes before it and node 0 is the root. ``fold`` asks for the state after the
    journal to be written to the state slot in this step. Nodes of such a request keep an L that
    starts at the new state: afterwards its journal must be emptied, and then the accepted nodes
    appended.
    """

    slots: Array  # [b] int64: request slots, whose row buffers these are
    state_slots: Array  # [b] int64: where S0 is
    journal: Array  # [b, M] int64 row ids, oldest first; entries past journal_len are not read
    journal_len: Array  # [b] int64
    rows: Array  # [b, T] int64: a free row for each node
    parents: Array  # [b, T] int64: node indices; the root's is 0
    ancestors: Array | None  # [b, T] int64: bit j is set if node j is node i or above it; None for
    # backends that follow ``parents``
    tail: Array  # [b, K-1] int64: places of the last K-1 tokens before the tree, oldest first
    fold: Array | None = None  # [b] bool
    round_keys: Array | None = None  # [b] int64: of the noise that rounds a folded state; None: to
    # the nearest number

    @property
    def up_to_rows(self) -> tuple[Array, ...]:
        """The first five, which kernels take one after the other."""
        return self[:5]


class Folds(NamedTuple):
    """Which journals become a part of which states. No two requests have the same state slot unless
    one of them is not folded."""

    slots: Tensor  # [b] int64: request slots, in the row buffers
    state_slots: Tensor  # [b] int64
    journal: Tensor  # [b, M] int64, contiguous: row ids, oldest first; not read past ``length``
    length: Tensor  # [b] int64, at most M; 0: the request's states are neither read nor changed
    wanted: Tensor | None = None  # [b] bool: which requests are folded; None: all. Delta rules only
    round_keys: Tensor | None = None  # [b] int64, as in TreeLayout


class Paths(NamedTuple):
    """Where each request slot stands; W rows per request, D the most tokens accepted per step."""

    state_slot: Tensor  # [R] int64
    path: Tensor  # [R, K-1 + W + D] int64 places
    journal_len: Tensor  # [R] int64


class Room(NamedTuple):
    """What a request's buffer has room for."""

    history: int  # K-1
    rows: int  # W
    max_journal: int  # M
    accepts: int  # D: most tokens accepted in a step


def free_rows(path: Tensor, length: Tensor, history: int, rows: int, count: int) -> Tensor:
    """The lowest ``count`` rows that neither belong to the journal nor serve as history.

    path: [b, K-1 + rows or more]; length: [b], of the journal -> [b, count] int64.
    """
    path = path[:, : history + rows]
    used = torch.arange(history + rows, device=path.device) < (history + length)[:, None]
    # places below K-1 are history, not rows
    taken = torch.where(used & (path >= history), path - history, rows)
    marks = torch.zeros(len(path), rows + 1, dtype=torch.int8, device=path.device)
    marks.scatter_(1, taken, 1)
    return marks[:, :rows].argsort(dim=1, stable=True)[:, :count]
