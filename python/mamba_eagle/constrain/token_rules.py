"""Token ids that an output may be made of, and sequences of them that it may not have.

``RuledMatcher`` has the verbs of llguidance's matcher, so what asks a grammar about the nodes of a
tree asks these rules, and a request may have both.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from llguidance import LLMatcher

from mamba_eagle.constrain.place import Row, bits, is_allowed
from mamba_eagle.core import SamplingParams


class TokenRules:
    """A request's ``allowed_token_ids`` and ``bad_word_ids``. words: of a mask."""

    def __init__(self, params: SamplingParams, words: int) -> None:
        allowed = params.allowed_token_ids
        self._always = bits(allowed, words) if allowed else np.full(words, ~np.uint32(0))
        self._always &= ~bits([ids[0] for ids in params.bad_word_ids if len(ids) == 1], words)
        # of longer ones the last tokens, by those before; and how many these are
        self._ends: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for ids in params.bad_word_ids:
            if len(ids) > 1:
                self._ends[tuple(ids[:-1])].add(ids[-1])
        self._sizes = set(map(len, self._ends))

    def allows(self, token: int, output: Sequence[int]) -> bool:
        banned = any(token in ends for ends in self._completed(output))
        return is_allowed(self._always, token) and not banned

    def restrict(self, mask: Row, output: Sequence[int]) -> None:
        """Take out of a mask what may not follow the output."""
        mask &= self._always
        for ends in self._completed(output):
            mask &= ~bits(ends, len(mask))

    def _completed(self, output: Sequence[int]) -> Iterator[set[int]]:
        """The tokens that would complete a sequence, by how long it is. A request may ban tens of
        thousands of sequences, so none of them is looked at."""
        for size in self._sizes:
            if ends := self._ends.get(tuple(output[-size:])):
                yield ends


class AnyTokens:
    """The matcher of a request that has rules and no grammar."""

    def deep_copy(self) -> AnyTokens:
        return self

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""

    def is_stopped(self) -> bool:
        return False

    def compute_ff_tokens(self) -> list[int]:
        return []

    def rollback(self, num_tokens: int) -> bool:
        return True

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0xFF, num_bytes)


class RuledMatcher:
    """A grammar's matcher, or ``AnyTokens``, that also keeps a request's rules."""

    def __init__(
        self, inner: LLMatcher | AnyTokens, rules: TokenRules, taken: Sequence[int] = ()
    ) -> None:
        self._inner, self._rules, self._taken = inner, rules, list(taken)
        self.is_error, self.get_error = inner.is_error, inner.get_error
        self.is_stopped = inner.is_stopped

    def deep_copy(self) -> RuledMatcher:
        return RuledMatcher(self._inner.deep_copy(), self._rules, self._taken)

    def compute_ff_tokens(self) -> list[int]:
        forced = self._inner.compute_ff_tokens()
        return forced if forced and self._rules.allows(forced[0], self._taken) else []

    def rollback(self, num_tokens: int) -> bool:
        del self._taken[len(self._taken) - num_tokens :]
        return self._inner.rollback(num_tokens)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for count, token in enumerate(tokens):
            if not self._rules.allows(token, self._taken):
                return count
            if not self._inner.try_consume_tokens([token]):
                return count
            self._taken.append(token)
        return len(tokens)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)
        words = (ctypes.c_uint32 * (num_bytes // 4)).from_address(address)
        self._rules.restrict(np.ctypeslib.as_array(words), self._taken)


Matcher = LLMatcher | RuledMatcher | AnyTokens
