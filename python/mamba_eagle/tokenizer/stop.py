"""Stop strings: found in text that grows token by token, and kept out of a stream until certain."""

from __future__ import annotations

from typing import NamedTuple


class StopMatch(NamedTuple):
    """``string`` is text[start:end]."""

    start: int
    end: int
    string: str


class StopFinder:
    """Looks for any of ``strings``. It keeps no text; the caller owns it."""

    def __init__(self, strings: list[str]) -> None:
        self.strings = strings

    def __bool__(self) -> bool:
        return bool(self.strings)

    def find(self, text: str, seen: int) -> StopMatch | None:
        """The match that ends in text[seen:]; of several the first to begin, then the longest.

        Called after every token, so that the answer does not depend on how many tokens arrived
        in a message, and only text near the end is searched.
        """
        best: StopMatch | None = None
        for string in self.strings:
            at = text.find(string, max(0, seen - len(string) + 1))
            if at < 0:
                continue
            match = StopMatch(at, at + len(string), string)
            if best is None or (match.start, -match.end) < (best.start, -best.end):
                best = match
        return best

    def held_back(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        held = 0
        for string in self.strings:
            for length in range(min(len(string) - 1, len(text)), held, -1):
                if text.endswith(string[:length]):
                    held = length
                    break
        return held
