"""Where a request's matcher stands: behind its output, or behind drafted tokens."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property

from llguidance import LLMatcher

from mamba_eagle.constrain.place import Place
from mamba_eagle.constrain.token_rules import AnyTokens, Matcher, RuledMatcher, TokenRules
from mamba_eagle.constrain.vocabulary import NoVocabulary, own_words


class Standing:
    """Follows the output of a request, and drafted tokens behind it.

    One matcher is moved between the places that are asked about. It stays where it was last, which
    mostly is where the request goes on: then nothing is taken in twice. Masks of drafted tokens are
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
