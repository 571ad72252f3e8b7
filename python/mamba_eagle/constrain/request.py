"""One request's place in its grammar, and the masks of a tree that is drafted from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mamba_eagle.constrain.place import FREE, UNKNOWN, Place, Row, bits, is_allowed
from mamba_eagle.constrain.token_rules import AnyTokens, Matcher, RuledMatcher, TokenRules
from mamba_eagle.constrain.vocabulary import NoVocabulary, own_words
from mamba_eagle.core import SamplingParams


class Standing:
    """Follows the output of a request, and drafted tokens behind it.

    One matcher is moved between the places that are asked about. It stays where it was last, which
    is mostly where the request goes on: then nothing is taken in twice. Masks of drafted tokens are
    computed by copies of it (``Branch``).

    A grammar that fails has a ``problem``: its request cannot go on, and no other is touched.
    """

    def __init__(
        self,
        base: Future[LLMatcher] | None,
        rules: TokenRules | None,
        stops: frozenset[int],
        spoiled: Callable[[], None],
    ) -> None:
        """base: a matcher at the start of the grammar, which is copied when it is there; None: the
        request has rules of tokens alone. stops: tokens that end the request. spoiled: called when
        the grammar fails."""
        self._base, self._rules, self._stops, self._spoiled = base, rules, stops, spoiled
        self.output: list[int] = []  # tokens taken in
        self.root = Place(None, -1, 0)  # behind the output
        self._here = self.root  # where the matcher stands
        self.problem = ""
        # whether the grammar refused or forced any token that the last step asked about
        self.narrow = self._seen_narrow = True

    @cached_property
    def _matcher(self) -> Matcher | None:
        """Waits until the grammar is compiled; None if that failed."""
        try:
            base = self._start()
        except NoVocabulary as error:
            self._fail(str(error))
            return None
        if base.is_error():
            self._fail(base.get_error())
            return None
        self._take_in(base, self.output)
        return base

    def _start(self) -> Matcher:
        """Another one at the start. Raises: NoVocabulary"""
        start = AnyTokens() if self._base is None else self._base.result().deep_copy()
        return start if self._rules is None else RuledMatcher(start, self._rules)

    def _fail(self, message: str) -> None:
        self.problem = own_words(message)
        self._spoiled()

    def advance(self, tokens: Sequence[int]) -> None:
        """The request has generated these tokens, or had generated them before it was retracted."""
        if not tokens:
            return
        self.narrow, self._seen_narrow = self._seen_narrow, False
        self.output += tokens
        place, taken = self.root, 0
        for token in tokens:
            below = place.below.get(token)
            if below is None:
                break
            place, taken = below, taken + 1
        if "_matcher" in self.__dict__ and self._matcher is not None and not self.problem:
            matcher = self._stand_at(place)
            if matcher is None:
                del self.__dict__["_matcher"]  # another one takes in the whole output
            elif taken < len(tokens):
                self._take_in(matcher, tokens[taken:])
        if taken < len(tokens):
            place = Place(None, -1, len(self.output))
        place.above = None
        self.root = self._here = place

    def _take_in(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        taken = matcher.try_consume_tokens(list(tokens))
        # the end token behind a finished grammar is not taken: with it the request has ended
        if taken < len(tokens) and tokens[taken] not in self._stops:
            reason = f"it does not go on with token {tokens[taken]}, which was generated"
            self._fail(matcher.get_error() or reason)

    def _stand_at(self, place: Place) -> Matcher | None:
        """The matcher, behind the tokens that lead to ``place``; None after an error."""
        matcher, here = self._matcher, self._here
        if matcher is None or self.problem:
            return None
        if here is place:
            return matcher
        back, forth = 0, []
        while here is not place:
            if here.depth >= place.depth:
                assert here.above is not None
                here, back = here.above, back + 1
            else:
                assert place.above is not None
                forth.append(place.token)
                place = place.above
        if back:
            matcher.rollback(back)
        self._here = here
        for token in reversed(forth):  # which it has taken before
            if not self._step_in(token):
                if matcher.is_error():
                    self._recover(matcher.get_error())
                return None
        return matcher

    def _step_in(self, token: int) -> bool:
        """Go on with a drafted token; False if nothing can follow it."""
        assert self._matcher is not None
        if self._matcher.try_consume_tokens([token]) == 0:
            return False
        here = self._here
        below = here.below.get(token)
        if below is None:
            below = here.below[token] = Place(here, token, here.depth + 1)
        self._here = below
        return True

    def _recover(self, message: str) -> None:
        """A matcher never leaves its error: behind drafted tokens another takes its place, since
        these need not be accepted."""
        if self._here is self.root:
            self._fail(message)
            return
        matcher = self._start()
        self._take_in(matcher, [*self.output, *self._here.way()])
        self.__dict__["_matcher"] = matcher


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

        It costs a fraction of a mask. Also None where only the mask tells: for tokens that may
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
        """A branch at the end of the output; None after an error."""
        matcher = self._stand_at(self.root)
        return None if matcher is None else Branch(self, matcher.deep_copy(), self.root.depth)

    def _fill(self, matcher: Matcher, row: Row, address: int, depth: int) -> bool:
        """Write the mask of what may follow where ``matcher`` stands, ``depth`` tokens behind the
        start; False if it cannot tell. address: of ``row``, which numpy takes as long to tell as a
        mask takes."""
        matcher.unsafe_compute_mask_ptr(address, 4 * self._words)
        if matcher.is_error():
            return False
        # end tokens leave a mask that has others
        early = depth < self._min_new_tokens
        held = self._not_early if early else self._never
        if held is not None:
            others = row & ~held
            if others.any():
                row[:] = others
        return True


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


Masks = npt.NDArray[np.uint32]  # [T, W]: bit ``v % 32`` of word ``v // 32`` is set: v is allowed


def fill_masks(
    grammar: RequestGrammar, tokens: Sequence[int], parents: Sequence[int], masks: Masks
) -> list[int]:
    """Write the masks of all nodes that can be reached, and return the others: the nodes that the
    grammar refuses, and those below them. A mask depends on the tokens of the path from the root
    alone: a matcher is copied where the tree forks, and goes along one path.

    tokens, parents [T] of the tree; the root, node 0, is the last token that ``grammar`` has taken
    in. masks: all ones. The rows of refused nodes keep them: what they allow is not read, and a
    row without any token would make a NaN of its softmax.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        children[parents[node]].append(node)
    address, row_bytes = masks.ctypes.data, masks.strides[0]
    root, branch = grammar.mask(), grammar.branch()
    if root is None or branch is None:
        masks[0] = 0
        return list(range(1, len(tokens)))
    masks[0] = root
    refused: list[int] = []

    def visit(above: int, branch: Branch) -> None:
        row, below = masks[above], []
        for node in children[above]:
            if is_allowed(row, tokens[node]):
                below.append(node)
            else:
                refuse(node)
        for node in below:
            own = branch if node == below[-1] else branch.fork()
            if not own.step_in(tokens[node]):
                continue  # an end token behind a finished grammar: a leaf, which ends the request
            if own.fill(masks[node], address + node * row_bytes):
                if children[node]:
                    visit(node, own)
            else:
                refused.extend(children[node])

    def refuse(node: int) -> None:
        refused.append(node)
        for child in children[node]:
            refuse(child)

    visit(0, branch)
    return sorted(refused)
