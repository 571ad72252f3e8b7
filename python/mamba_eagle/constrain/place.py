"""Where a matcher can stand: behind the output of a request, and behind drafted tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.uint32]  # [W], one mask
# of ``Place.forced``: not asked yet, and any of several tokens may follow
UNKNOWN, FREE = -2, -1


class Place:
    """A path of tokens, and what is known of the grammar at its end.

    Places are kept until the request goes on, so drafting, reshaping and verification of one step
    ask the matcher once for each.
    """

    __slots__ = ("above", "below", "depth", "forced", "mask", "token")

    def __init__(self, above: Place | None, token: int, depth: int) -> None:
        """depth: output tokens and drafted tokens up to here."""
        self.above, self.token, self.depth = above, token, depth
        self.below: dict[int, Place | None] = {}  # None: refused
        self.forced = UNKNOWN  # the one token that may follow, if it is not an end token
        self.mask: Row | None = None

    def way(self) -> list[int]:
        """The drafted tokens that lead here."""
        tokens, place = [], self
        while place.above is not None:
            tokens.append(place.token)
            place = place.above
        return tokens[::-1]


def is_allowed(mask: Row, token: int) -> bool:
    """Whether a mask has a token."""
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def bits(tokens: Iterable[int], words: int) -> Row:
    """A mask of these tokens alone."""
    ids, flags = np.fromiter(tokens, dtype=np.int64), np.zeros(32 * words, dtype=np.bool_)
    flags[ids[(ids >= 0) & (ids < len(flags))]] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
