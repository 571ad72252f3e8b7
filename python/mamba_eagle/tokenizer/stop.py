"""Stop strings: found in text that grows token by token, and kept out of a stream until certain.

The strings form an automaton (Aho and Corasick, "Efficient string matching", 1975), so that a
character costs the same however many strings there are and however they overlap.
"""

from collections import deque
from typing import NamedTuple


class StopMatch(NamedTuple):
    """``string`` is text[start:end]."""

    start: int
    end: int
    string: str


class StopStrings:
    """The automaton of some strings; never changes, and samples share it.

    A state stands for the longest end of the text so far that begins one of the strings; state 0
    for none.
    """

    def __init__(self, strings: list[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # characters that the state stands for
        self.matched = [0]  # length of the longest string that ends in the state; 0: none
        for string in strings:
            self._add(string)
        self._fallback = [0] * len(self._next)  # the longest proper end that is a state, too
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self.matched.append(0)
            state = following
        self.matched[state] = len(string)

    def _link(self) -> None:
        """Sets the fallbacks, from short states to long ones."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            self.matched[state] = self.matched[state] or self.matched[self._fallback[state]]
            for char, following in self._next[state].items():
                states.append(following)
                self._fallback[following] = self.advance(self._fallback[state], char)

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def held_back(self, state: int) -> int:
        """How many characters at the end of the text may be the beginning of a string."""
        while not self._next[state]:  # a whole string that begins no longer one
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._depth[state]


class StopFinder:
    """Looks for any of the strings in one text. It keeps no text; the caller owns it."""

    def __init__(self, strings: StopStrings) -> None:
        self.strings = strings
        self._state = 0
        self._seen = 0  # characters

    def __bool__(self) -> bool:
        return bool(self.strings)

    def find(self, text: str) -> StopMatch | None:
        """The match that ends in what was added to ``text`` since the last call; of several the
        first to begin, then the longest.

        Called after every token, so that the answer does not depend on how many tokens arrived
        in a message.
        """
        strings, state = self.strings, self._state
        best: tuple[int, int] | None = None  # start, end
        for end in range(self._seen + 1, len(text) + 1):
            state = strings.advance(state, text[end - 1])
            if length := strings.matched[state]:
                match = (end - length, end)
                if best is None or (match[0], -match[1]) < (best[0], -best[1]):
                    best = match
        self._state, self._seen = state, len(text)
        return StopMatch(*best, text[slice(*best)]) if best is not None else None

    def held_back(self) -> int:
        """How many characters at the end of what ``find`` has seen may begin a stop string."""
        return self.strings.held_back(self._state)
