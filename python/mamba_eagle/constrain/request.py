"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

from mamba_eagle.constrain.place import FREE, UNKNOWN, Place, Row, bits, is_allowed
from mamba_eagle.constrain.standing import Standing
from mamba_eagle.constrain.token_rules import Matcher, TokenRules
from mamba_eagle.core import SamplingParams


class RequestGrammar(Standing):
    """What the grammar of a request allows behind its output, and behind drafted tokens.

    The end: behind the last token that a grammar can take, only the model's end tokens are left.
    Before that an end token is one choice among others wherever the text may end. ``ignore_eos``
    and ``min_new_tokens`` take that choice away as long as there is another.
    """

    def __init__(
        self,
        base: Future[LLMatcher] | None,
        params: SamplingParams,
        eos: Sequence[int],
        words: int,
        spoiled: Callable[[], None],
    ) -> None:
        """words: of a mask. Others: as of ``Standing``."""
        rules = TokenRules(params, words) if params.has_token_rules else None
        super().__init__(base, rules, frozenset(params.stop_tokens(tuple(eos))), spoiled)
        self._words = words
        self._min_new_tokens = params.min_new_tokens
        self._not_early = bits(self._stops, words) if params.min_new_tokens else None
        self._never = bits(eos, words) if params.ignore_eos and params.grammar else None

    # ── what may follow a place ──

    def forced(self, place: Place) -> int | None:
        """The one token that may follow, if the grammar forces the text."""
        if place.forced == UNKNOWN:
            matcher = self._stand_at(place)
            if matcher is None:
                return None
            # Where the grammar forces the text, a mask allows one way to spell it as tokens.
            tokens = matcher.compute_ff_tokens()
            place.forced = tokens[0] if tokens else FREE
            self._seen_narrow |= bool(tokens)
        return None if place.forced == FREE else place.forced

    def below(self, place: Place, token: int) -> Place | None:
        """The place behind one more token; None if the grammar refuses it.

        It costs a fraction of a mask. None, too, where only the mask tells: for tokens that may
        end the output, or after an error.
        """
        if token in self._stops:
            return None
        if token in place.below:
            return place.below[token]
        below, mask = None, place.mask
        if mask is None or is_allowed(mask, token):
            forced, matcher = self.forced(place), self._stand_at(place)
            if matcher is not None and (forced is None or token == forced):
                if matcher.try_consume_tokens([token]):
                    below = self._here = Place(place, token, place.depth + 1)
                elif matcher.is_error():
                    self._recover(matcher.get_error())
        place.below[token] = below
        self._seen_narrow |= below is None
        return below

    def may_end_with(self, token: int) -> bool:
        """Whether a token may end the output, so that only a mask tells whether it may follow."""
        return token in self._stops

    def mask(self, place: Place | None = None) -> Row | None:
        """What may follow a place, by default the output; to be read only. None if the grammar
        cannot tell, because it exceeds its limits here: then nothing may follow."""
        place = place or self.root
        if place.mask is None:
            matcher = self._stand_at(place)
            if matcher is None:
                return None
            # Not where it may be rolled back: see Branch.
            asked = matcher if place is self.root else matcher.deep_copy()
            row = np.empty(self._words, dtype=np.uint32)
            if not self._fill(asked, row, row.ctypes.data, place.depth):
                if place is self.root:
                    self._fail(asked.get_error())
                return None
            place.mask = row
        return place.mask

    def is_over(self, place: Place) -> bool:
        """Whether nothing but the end can follow."""
        matcher = self._stand_at(place)
        return matcher is None or matcher.is_stopped()

    def empty_mask(self) -> Row:
        """Nothing may follow."""
        return np.zeros(self._words, dtype=np.uint32)

    def branch(self) -> Branch | None:
        """At the end of the output; None after an error."""
        matcher = self._stand_at(self.root)
        return None if matcher is None else Branch(self, matcher.deep_copy(), self.root.depth)

    def _fill(self, matcher: Matcher, row: Row, address: int, depth: int) -> bool:
        """Write the mask of what may follow where ``matcher`` stands, ``depth`` tokens behind the
        start; False if it cannot tell. address: of ``row``, which numpy takes as long to tell as a
        mask takes."""
        matcher.unsafe_compute_mask_ptr(address, 4 * self._words)
        if matcher.is_error():
            return False
        self._hold(row, depth)
        return True

    def _hold(self, row: Row, count: int) -> None:
        """Take end tokens out of a mask that has others. count: output tokens so far."""
        early = count < self._min_new_tokens
        held = self._not_early if early else self._never
        if held is not None:
            others = row & ~held
            if others.any():
                row[:] = others


class Branch:
    """A matcher of its own that goes along one path of a tree, for masks of many nodes.

    It is never rolled back. A matcher keeps its last mask, and gives it again at any place with as
    many parsed lexemes and the same state of the lexer. Behind a rollback that may be another
    place, with another stack: the mask of ``]`` in one branch of a tree would be given for ``}`` in
    another. So the request's own matcher, which is rolled back, computes masks where it never goes
    back behind, at the end of the output, and copies compute the others.
    """

    __slots__ = ("_depth", "_grammar", "_matcher")

    def __init__(self, grammar: RequestGrammar, matcher: Matcher, depth: int) -> None:
        """depth: output tokens and drafted tokens up to here."""
        self._grammar, self._matcher, self._depth = grammar, matcher, depth

    def fork(self) -> Branch:
        """Another one that stands here."""
        return Branch(self._grammar, self._matcher.deep_copy(), self._depth)

    def step_in(self, token: int) -> bool:
        """Go on with a drafted token that the mask here allows; False if nothing can follow it."""
        self._depth += 1
        return self._matcher.try_consume_tokens([token]) == 1

    def fill(self, row: Row, address: int) -> bool:
        """Write the mask of what may follow; False if the grammar cannot tell, because it exceeds
        its limits: nothing may follow. address: of ``row``."""
        if self._grammar._fill(self._matcher, row, address, self._depth):
            return True
        row[:] = 0
        return False
