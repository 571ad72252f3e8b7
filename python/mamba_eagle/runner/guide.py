"""Lets a drafter's network see what grammars allow, on a CPU.

Where the grammar forces a token, that token has probability 1. Elsewhere a mask is looked at only
if the network's own best token is refused: within free text the network knows how the text goes on,
and ranking by the grammar would gain nothing. A request whose last step met neither case is within
free text, and its drafts are left alone until the grammar refuses something again. Where the text
is forced for most of a tree's levels, or of those that are left, the network is not asked at all:
behind the name of a field there is a choice, and behind the choice the next name.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.constrain.place import Place, Row
from mamba_eagle.constrain.request import RequestGrammar
from mamba_eagle.drafting.base import KeyedNoise
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy.torch import whole_log_probs
from mamba_eagle.runner.constraints import Constraints
from mamba_eagle.runner.sampling_state import BatchNoise, SamplingState
from mamba_eagle.tree.candidates import Frontier

NONE = -1  # no token is forced


def is_narrow(mask: Row) -> bool:
    """Whether it forbids so much that a drafter would often be wrong: most words of it are empty.
    Within a string of JSON most tokens are allowed, and the drafter is as good as without."""
    return bool(2 * np.count_nonzero(mask) < len(mask))


class GrammarGuide(KeyedNoise):
    """Log-probabilities among the tokens that may follow a lane, after those of ``noise``.

    A forced token has probability 1 then, and so it is in the tree.
    """

    def __init__(
        self,
        constraints: Constraints,
        slots: Sequence[int],
        sampling: SamplingState,
        noise: BatchNoise | None,
    ) -> None:
        self.noise, self.backend, self.vocab_size = noise, sampling.backend, sampling.vocab_size
        self.grammars: dict[int, RequestGrammar] = {}  # by index in the batch, those that lead
        self.lanes: dict[int, list[Place | None]] = {}  # None: nothing will be accepted there
        self.followed = True  # the lanes are those of the next call
        for i, slot in enumerate(slots):
            grammar = constraints.grammar(slot)
            if grammar is None:
                continue
            if grammar.narrow or grammar.forced(grammar.root) is not None:
                self.grammars[i], self.lanes[i] = grammar, [grammar.root]

    def fixed(self, depth: int) -> Sequence[int]:
        """Those whose text is forced for more than half the levels: reshaping their trees
        (constrain/reshape.py) makes a chain of that."""
        roots = ((i, grammar, grammar.root) for i, grammar in self.grammars.items())
        return [i for i, grammar, root in roots if is_fixed(grammar, root, depth)]

    def forced(self, requests: int, k: int, levels: int) -> TopTokens | None:
        if not self.followed or len(self.lanes) < requests:
            return None
        tokens: list[list[int]] = []
        for i in range(requests):
            grammar, places = self.grammars[i], self.lanes[i]
            living = [place for place in places if place is not None]
            if levels and not all(is_fixed(grammar, place, levels) for place in living):
                return None
            given = [None if place is None else grammar.forced(place) for place in places]
            tokens.append([NONE if token is None else token for token in given])
        self.followed = False
        first = torch.tensor(tokens)
        children = first.new_zeros(*first.shape, k)
        log_probs = torch.full(children.shape, -torch.inf)
        children[..., 0] = first.clamp(min=0)
        log_probs[..., 0] = torch.where(first == NONE, -torch.inf, 0.0)
        return TopTokens(log_probs, children)

    def of(self, requests: Sequence[int]) -> GrammarGuide:
        own = copy(self)
        own.noise = None if self.noise is None else self.noise.of(requests)
        kept = [(new, old) for new, old in enumerate(requests) if old in self.grammars]
        own.grammars = {new: self.grammars[old] for new, old in kept}
        own.lanes = {new: self.lanes[old] for new, old in kept}
        return own

    def best(
        self, logits: Tensor, vocabulary: DraftVocabulary, positions: Tensor, k: int
    ) -> TopTokens:
        whole = vocabulary.whole(logits)
        log_probs = whole_log_probs(whole, vocabulary.ids, self.vocab_size)
        if self.noise is not None:
            log_probs = self.noise.noisy(log_probs, positions)
        best = self.backend.top_of(self._guided(log_probs).flatten(0, 1), k)
        return best.unflatten(logits.shape[:2])

    def _guided(self, log_probs: Tensor) -> Tensor:
        """[b, lanes, V] -> the same, those of forbidden tokens -inf where a mask is worth it."""
        if not self.followed:
            return log_probs  # the drafter's lanes have no tokens, or it does not tell them
        self.followed = False
        b, lanes, vocab = log_probs.shape
        flat = log_probs.reshape(b * lanes, vocab)
        forced: dict[int, int] = {}  # tokens by row of ``flat``
        free: list[tuple[int, RequestGrammar, Place]] = []  # rows
        for i, places in self.lanes.items():
            for row, place in enumerate(places, i * lanes):
                if place is None:
                    continue
                token = self.grammars[i].forced(place)
                if token is None:
                    free.append((row, self.grammars[i], place))
                else:
                    forced[row] = token
        masks = _narrow_masks(free, flat)
        if not forced and not masks:
            return log_probs
        left = torch.full((len(forced) + len(masks), vocab), -torch.inf)
        left.numpy()[range(len(forced)), list(forced.values())] = 0.0
        if masks:
            rows = torch.tensor(list(masks))
            bits = torch.from_numpy(np.stack(list(masks.values())).view(np.int32))
            own = self.backend.mask_logits(flat[rows], torch.arange(len(masks)), bits)
            # NaN: the drafter knows none of the tokens that are allowed
            own = own.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            left[len(forced) :] = own
        return flat.index_copy(0, torch.tensor([*forced, *masks]), left).view_as(log_probs)

    def follow(self, frontier: Frontier) -> None:
        self.followed = True
        tokens, lanes, scores = (part.tolist() for part in frontier)
        for i, grammar in self.grammars.items():
            above = self.lanes[i]
            self.lanes[i] = [
                _below(grammar, above[lane], token) if score > -np.inf else None
                for lane, token, score in zip(lanes[i], tokens[i], scores[i], strict=True)
            ]


def is_fixed(grammar: RequestGrammar, place: Place, depth: int) -> bool:
    """Whether the text behind a place is forced for most of the next ``depth`` tokens."""
    return 2 * forced_run(grammar, place, depth) > depth


def forced_run(grammar: RequestGrammar, place: Place, depth: int) -> int:
    """How many of the ``depth`` tokens behind a place are forced; all of them if the text ends
    there."""
    for count in range(depth):
        token = grammar.forced(place)
        if token is None:
            return depth if count and grammar.is_over(place) else count
        below = grammar.below(place, token)
        if below is None:
            return depth
        place = below
    return depth


def _below(grammar: RequestGrammar, place: Place | None, token: int) -> Place | None:
    return None if place is None else grammar.below(place, token)


def _narrow_masks(
    lanes: Sequence[tuple[int, RequestGrammar, Place]], log_probs: Tensor
) -> dict[int, Row]:
    """By row of ``log_probs`` [n, V], for lanes whose best token is refused."""
    masks: dict[int, Row] = {}
    if not lanes:
        return masks
    best = log_probs.argmax(-1).tolist()
    for row, grammar, place in lanes:
        if grammar.below(place, best[row]) is None:
            mask = grammar.mask(place)
            if mask is not None and is_narrow(mask):
                masks[row] = mask
    return masks
