"""On a GPU: masks are made while it verifies, as many as there is time for.

A mask takes 0.02 to 2 ms with 131,072 tokens, and masks are made one after the other: those of all
nodes of a large batch would take several times as long as the device verifies. So the host makes
them in the order of how likely they are needed, and stops before the device is done:

1. masks of the roots, first those of requests whose grammars refused or forced a token lately,
2. where drafted tokens lead, and where the text is forced: it costs a fraction of a mask,
3. masks of the other nodes.

The rest goes as on a CPU (constrained_choice.py): the host waits for the sampler, follows the
target's tokens through the trees, and makes a mask where a token is refused. The device waits
meanwhile, so what is known by then is not asked again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from mamba_eagle.backend.place import Timestamp
from mamba_eagle.constrain.place import Place, Row
from mamba_eagle.constrain.request import RequestGrammar
from mamba_eagle.core import PENALTIES
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.runner.constrained_choice import MasksFirst, MasksOnDemand, Walk
from mamba_eagle.runner.constraints import Marks, NodeLists, TokenMasks, TreeView
from mamba_eagle.runner.sampler import Scored

FEW_MASKS = 8  # there is time for the masks of this many nodes in any step of a model
MAX_AHEAD = 64  # masks, of 16 kB with 131,072 tokens
LATEST = 0.05  # weight of the latest mask in the usual time of one


class MasksWhileVerifying(MasksOnDemand):
    """Masks of all nodes where they are few. Otherwise as many as are made in time, and then masks
    on demand."""

    _usual = 0.0  # seconds of one mask, on average

    @cached_property
    def _seconds(self) -> dict[tuple[int, ...], float]:
        """To verify, by the shape of the batch."""
        return {}

    def choose(self, nodes: Scored, view: TreeView | None = None) -> tuple[Tensor, Marks]:
        count = sum(self.constraints.grammar(slot) is not None for slot in nodes.slots)
        shape = tuple(nodes.logits.shape[:2])
        if view is None or count * shape[1] <= FEW_MASKS:
            return MasksFirst.choose(self, nodes, view)
        ended = self.place.timestamp()
        trees = view.trees()  # the device begins to verify
        verifying = _Verifying(ended, self._expected(shape))
        chosen = self._choose(nodes, trees, lambda walks: self._ahead(walks, verifying, shape[1]))
        if verifying.waited_for:
            ended.wait()  # already over
            self._seconds[shape] = view.here.until(ended)
        return chosen

    def _expected(self, shape: tuple[int, ...]) -> float:
        """Seconds to verify a batch; of one that was never seen, those of a smaller one."""
        if shape in self._seconds:
            return self._seconds[shape]
        smaller = [each for each in self._seconds if math.prod(each) <= math.prod(shape)]
        return max((self._seconds[each] for each in smaller), default=0.0)

    def _may_wait(self, slot: int) -> bool:
        """Unless a token's score depends on the tokens above it, or all masks are to be seen."""
        return not self.table.wants_trace[slot] and not self.sampling.asks(slot, PENALTIES)

    def _walk_of(self, index: int, slot: int, grammar: RequestGrammar, tree: NodeLists) -> Walk:
        return _DeviceWalk(index, grammar, tree, self.sampling.filters_or_counts(slot))

    def _ahead(self, walks: Sequence[Walk], verifying: _Verifying, nodes: int) -> TokenMasks | None:
        """Masks for the first sampling, in the order above."""
        verifying.waited_for = True
        own = [walk for walk in walks if isinstance(walk, _DeviceWalk)]
        size = min(len(own) * nodes, MAX_AHEAD)
        buffer = self.constraints.host_masks(size)
        masks, rows = buffer.numpy().view(np.uint32), list[int]()

        def mask_all(asked: Iterable[tuple[_DeviceWalk, int]]) -> None:
            for walk, node in asked:
                began = time.perf_counter()
                # A few masks take ten times as long as most. The device may wait for the end of
                # one; for one that is needed and was not made it would wait from its beginning.
                if len(rows) == size or not verifying.lasts(began + self._usual):
                    break
                mask = walk.mask_of(node)
                if mask is not None:
                    masks[len(rows)] = mask
                    rows.append(walk.index * nodes + node)
                    walk.masked.add(node)
                self._usual += LATEST * (time.perf_counter() - began - self._usual)

        mask_all((walk, 0) for walk in sorted(own, key=lambda walk: not walk.grammar.narrow))
        others = [(walk, node) for node in range(1, nodes) for walk in own]
        for walk, node in others:
            if verifying.ended.reached:
                break
            walk.ask(node)
        mask_all(others)
        return self.constraints.send(rows, buffer[: len(rows)]) if rows else None


class _Verifying:
    """How long the device goes on verifying."""

    def __init__(self, ended: Timestamp, expected: float) -> None:
        """It has just begun. expected: seconds."""
        self.ended, self._until = ended, time.perf_counter() + expected
        self.waited_for = False  # by the host

    def lasts(self, until: float) -> bool:
        """Whether it is expected to. until: of time.perf_counter."""
        return until < self._until and not self.ended.reached


class _DeviceWalk(Walk):
    """A walk over logits that are on the device: whatever is refused is sampled again there."""

    def __init__(
        self, index: int, grammar: RequestGrammar, tree: NodeLists, needs_masks: bool
    ) -> None:
        """needs_masks: a token that was sampled without a mask says nothing, since filters would
        have kept others under one."""
        super().__init__(index, grammar, tree, is_resampled=True)
        self.needs_masks = needs_masks
        self.masked: set[int] = set()  # nodes that were sampled under a mask at once
        self._places: dict[int, Place | None] = {0: grammar.root}

    def ask(self, node: int) -> None:
        """Find out where a drafted token leads; its parent was asked before."""
        above = self._places.get(self.parents[node])
        place = None if above is None else self.grammar.below(above, self.drafted[node])
        self._places[node] = place
        if place is not None:
            self.grammar.forced(place)

    def mask_of(self, node: int) -> Row | None:
        """None where the grammar has no place or was not asked."""
        place = self._places.get(node)
        return None if place is None else self._mask_at(place)

    def _mask_at(self, place: Place) -> Row:
        forced = self.grammar.forced(place)
        if forced is not None and not self.grammar.may_end_with(forced):
            mask = self.grammar.empty_mask()  # a mask would leave this token alone
            mask[forced >> 5] = np.uint32(1 << (forced & 31))
            return mask
        made = self.grammar.mask(place)
        return self.grammar.empty_mask() if made is None else made

    def is_refused(self, target: list[int], logits: Tensor) -> bool:
        while self.node is not None:
            token = target[self.node]
            known = self.mask is not None or self.node in self.masked
            if not known and (self.needs_masks or not self._is_allowed(token)):
                self.mask = self._mask_at(self.place)
                return True
            child = self._child(self.node, token)
            below = None if child is None else self.grammar.below(self.place, token)
            if below is None:  # not drafted, or an end token
                self.node = None
            else:
                self.node, self.place, self.mask = child, below, None
        return False

    def _is_allowed(self, token: int) -> bool:
        if token == NO_TOKEN:
            return False
        return self.grammar.below(self.place, token) is not None or self._may_end_with(token)
