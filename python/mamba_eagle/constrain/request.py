"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mamba_eagle.constrain.vocabulary import NoVocabulary
from mamba_eagle.core import SamplingParams

Row = npt.NDArray[np.uint32]  # [W], one mask


class RequestGrammar:
    """Follows the output of a request; ``step_in`` and ``step_out`` try drafted tokens.

    A grammar that fails has a ``problem``: its request cannot go on, and no other is touched.

    The end: behind the last token that a grammar can take, only the model's end tokens are left.
    Before that an end token is one choice among others wherever the text may end. ``ignore_eos``
    and ``min_new_tokens`` take that choice away as long as there is another.
    """

    def __init__(
        self, base: Future[LLMatcher], params: SamplingParams, eos: Sequence[int], words: int
    ) -> None:
        """base: a matcher at the start of the grammar, which is copied when it is there. words: of
        a mask."""
        self._base, self._words = base, words
        self.output: list[int] = []  # tokens taken in
        self._path: list[int] = []  # drafted tokens that are tried behind them
        self._masks: dict[tuple[int, ...], Row] = {}  # by path: those that drafting asked for
        self.problem = ""
        self._stops = frozenset(params.stop_tokens(tuple(eos)))
        self._ends = self._stops | frozenset(eos)
        self._min_new_tokens = params.min_new_tokens
        self._not_early = _bits(self._stops, words) if params.min_new_tokens else None
        self._never = _bits(eos, words) if params.ignore_eos else None

    @cached_property
    def _matcher(self) -> LLMatcher | None:
        """Waits until the grammar is compiled; None if that failed."""
        try:
            base = self._base.result()
        except NoVocabulary as error:
            self.problem = str(error)
            return None
        if base.is_error():
            self.problem = base.get_error()
            return None
        matcher = base.deep_copy()
        self._take_in(matcher, self.output)
        return matcher

    def advance(self, tokens: Sequence[int]) -> None:
        """The request has generated these tokens, or had generated them before it was retracted."""
        self.output += tokens
        self._masks.clear()
        if "_matcher" in self.__dict__ and self._matcher is not None:
            self._take_in(self._matcher, tokens)

    def _take_in(self, matcher: LLMatcher, tokens: Sequence[int]) -> None:
        taken = matcher.try_consume_tokens(list(tokens))
        # the end token behind a finished grammar is not taken: with it the request has ended
        if taken < len(tokens) and tokens[taken] not in self._stops:
            self.problem = f"it does not go on with token {tokens[taken]}, which was generated"

    def fill(self, row: Row) -> bool:
        """Write the mask of what may follow the output and the drafted tokens stepped into.

        False if the grammar cannot tell, because it exceeds its limits here: nothing may follow.
        """
        matcher, path = self._matcher, tuple(self._path)
        if matcher is not None and not self.problem:
            if path in self._masks:
                row[:] = self._masks[path]
                return True
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not matcher.is_error():
                self._hold(row, len(self.output) + len(path))
                return True
            self._recover(matcher.get_error())
        row[:] = 0
        return False

    def mask(self) -> Row | None:
        """The same mask, to be read only; None if the grammar cannot tell."""
        known = self._masks.get(tuple(self._path))
        if known is not None:
            return known
        row = np.empty(self._words, dtype=np.uint32)
        if not self.fill(row):
            return None
        self._masks[tuple(self._path)] = row
        return row

    def mask_behind(self, path: Sequence[int]) -> Row | None:
        """The mask behind drafted tokens; None if the grammar refuses one of them, or if nothing
        can follow."""
        known = self._masks.get(tuple(path))
        if known is not None:
            return known
        stepped, mask = 0, None
        for token in path:
            if self._matcher is None or not self.step_in(token):
                break
            stepped += 1
        else:
            mask = self.mask()
        for _ in range(stepped):
            self.step_out()
        return mask

    @property
    def knows_masks(self) -> bool:
        """Whether any mask has been asked for since the request last went on."""
        return bool(self._masks)

    def known_mask(self) -> Row | None:
        """``mask`` if it has been asked for before."""
        return self._masks.get(tuple(self._path))

    def known_mask_behind(self, path: Sequence[int]) -> Row | None:
        """``mask_behind`` if it has been asked for before."""
        return self._masks.get(tuple(path))

    def empty_mask(self) -> Row:
        """Nothing may follow."""
        return np.zeros(self._words, dtype=np.uint32)

    def takes(self, token: int) -> bool:
        """Step into a token if the grammar goes on with it, for a fraction of what a mask costs.

        False where only the mask tells: for tokens that may end the output, or after an error.
        """
        if token in self._ends or self.problem or self._matcher is None:
            return False
        # Where the grammar forces the text, a mask allows one way to spell it as tokens.
        forced = self._matcher.compute_ff_tokens()
        if forced and token != forced[0]:
            return False
        if self._matcher.try_consume_tokens([token]):
            self._path.append(token)
            return True
        if self._matcher.is_error():
            self._recover(self._matcher.get_error())
        return False

    def allows(self, token: int) -> bool:
        """As ``takes``, without the step."""
        taken = self.takes(token)
        if taken:
            self.step_out()
        return taken

    def allows_behind(self, path: Sequence[int], token: int) -> bool:
        """Whether the grammar goes on with drafted tokens and then this one; as ``takes``."""
        stepped = 0
        for each in (*path, token):
            if not self.takes(each):
                break
            stepped += 1
        for _ in range(stepped):
            self.step_out()
        return stepped == len(path) + 1

    def _hold(self, row: Row, count: int) -> None:
        """Take end tokens out of a mask that has others. count: output tokens so far."""
        early = count < self._min_new_tokens
        held = self._not_early if early else self._never
        if held is not None:
            others = row & ~held
            if others.any():
                row[:] = others

    def _recover(self, message: str) -> None:
        """A matcher never leaves its error: behind drafted tokens another takes its place, since
        these need not be accepted."""
        if not self._path:
            self.problem = message
            return
        matcher = self._base.result().deep_copy()
        self._take_in(matcher, [*self.output, *self._path])
        self.__dict__["_matcher"] = matcher

    def step_in(self, token: int) -> bool:
        """Try a drafted token that the last mask allowed; False if nothing can follow it."""
        assert self._matcher is not None
        if self._matcher.try_consume_tokens([token]) == 0:
            return False
        self._path.append(token)
        return True

    def step_out(self) -> None:
        """Forget the token last stepped into."""
        assert self._matcher is not None
        self._matcher.rollback(1)
        self._path.pop()


def _bits(tokens: Sequence[int] | frozenset[int], words: int) -> Row:
    row = np.zeros(words, dtype=np.uint32)
    for token in tokens:
        if 0 <= token < 32 * words:
            row[token >> 5] |= np.uint32(1 << (token & 31))
    return row
