"""Which rows the nodes of a step take, and which of them stay: one request, in plain lists.

A request's buffer of convolution inputs has K-1 places of history and then W rows, so row r is at
place K-1 + r. Its *path* lists places in the order of the sequence:

    path   [ K-1 places: the tokens before S0 | the journal's places, oldest first ]

The last K-1 places of the path, its *tail*, are what the convolution of a tree's root looks back
on. After a fold the journal is empty and the tail takes the place of the history; those rows hold
inputs that are still needed and are not given to new nodes.
"""

from typing import Any, NamedTuple


def free_rows(path: list[int], history: int, rows: int, count: int) -> list[int]:
    """The lowest ``count`` of ``rows`` rows that the path does not use; history = K-1."""
    used = {place - history for place in path}  # below 0: a place of history, which is no row
    return [row for row in range(rows) if row not in used][:count]


class Begun(NamedTuple):
    """What a step needs to know of a request before it runs."""

    rows: list[int]  # one per node
    journal: list[int]  # row ids, oldest first
    tail: list[int]  # places
    folds: bool  # S0 becomes the state after the journal in this step


class RowKeeper:
    """The rows of one request from step to step.

    Args:
        history: K-1; rows: W; max_journal: rows that a journal may have.
        accepts: most tokens that a step accepts.
        feature: of the token after which S0 was saved; any value.
    """

    def __init__(
        self, history: int, rows: int, max_journal: int, accepts: int, feature: Any
    ) -> None:
        self.history, self.rows = history, rows
        self.max_journal, self.accepts = max_journal, accepts
        self.path = list(range(history))
        self.features: dict[int, Any] = {}  # by row
        self.saved_feature = feature

    @property
    def journal(self) -> list[int]:
        return [place - self.history for place in self.path[self.history :]]

    def begin(self, num_nodes: int) -> Begun:
        """A journal that this step might make too long is folded in it."""
        return Begun(
            rows=free_rows(self.path, self.history, self.rows, num_nodes),
            journal=self.journal,
            tail=self.path[len(self.path) - self.history :],
            folds=len(self.journal) + self.accepts > self.max_journal,
        )

    def accept(self, step: Begun, nodes: list[int], features: list[Any]) -> None:
        """``nodes`` of the step join the journal, in this order. features: of all its nodes."""
        if step.folds:
            if step.journal:
                self.saved_feature = self.features[step.journal[-1]]
            self.path = list(step.tail)
        for node in nodes:
            row = step.rows[node]
            self.path.append(self.history + row)
            self.features[row] = features[node]
