"""Counts what a JSON text is made of, before anything is made of it.

A body of a few MiB can hold millions of empty lists, which take seconds and gigabytes to decode
while no other Python code runs. The scan takes numpy's time instead, which other threads do not
wait for, and makes nothing that grows with the text. It does not say whether the text is valid.
"""

from typing import NamedTuple

import numpy as np

from mamba_eagle.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_ITEMS,
    MAX_JSON_NUMBERS,
    MAX_JSON_STRINGS,
)

SLICE = 2**17  # bytes looked at at a time
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")


class Counts(NamedTuple):
    containers: int  # arrays and objects
    strings: int  # keys included
    items: int  # commas and containers: no fewer than there are items

    @property
    def problem(self) -> str:
        """Which limit the text exceeds, as the end of a sentence; "" if none."""
        for name, most, count in (
            ("arrays and objects", MAX_JSON_CONTAINERS, self.containers),
            ("strings, keys included,", MAX_JSON_STRINGS, self.strings),
            ("items", MAX_JSON_ITEMS, self.items),
        ):
            if count > most:
                return f"has {count} {name} but may have at most {most}: send fewer at a time"
        return ""

    @property
    def many_numbers(self) -> bool:
        """So many that only token ids can be meant."""
        return self.items - self.strings > MAX_JSON_NUMBERS


def scan(text: bytes) -> Counts:
    """Counts outside of strings."""
    data = np.frombuffer(text, np.uint8)
    containers = quotes = commas = 0
    inside = False  # a string, at the beginning of the slice
    escaped = False  # the first byte of the slice
    for start in range(0, len(data), SLICE):
        part = data[start : start + SLICE]
        is_quote = part == _QUOTE
        escaped = _drop_escaped(part, is_quote, escaped)
        # The parity of the quotes so far: 1 within a string and on its first quote.
        within = np.bitwise_xor.accumulate(is_quote.view(np.uint8)) ^ np.uint8(inside)
        inside = bool(within[-1])
        outside = within == 0
        # '[' and '{' differ in one bit; no other byte is mapped on '{'.
        containers += int(np.count_nonzero(((part | 0x20) == ord("{")) & outside))
        commas += int(np.count_nonzero((part == _COMMA) & outside))
        quotes += int(np.count_nonzero(is_quote))
    return Counts(containers, (quotes + 1) // 2, commas + containers)


def _drop_escaped(part: np.ndarray, is_quote: np.ndarray, escaped: bool) -> bool:
    """Clears quotes behind a backslash that is not escaped itself; whether the byte after the
    part is escaped."""
    is_backslash = part == _BACKSLASH
    if escaped:
        is_quote[0] = is_backslash[0] = False
    places = np.flatnonzero(is_backslash)
    if not len(places):
        return False
    # Of a run of backslashes the first, the third, … escape the byte behind them.
    order = np.arange(len(places))
    begins = np.diff(places, prepend=-2) != 1
    first = np.maximum.accumulate(np.where(begins, order, 0))
    targets = places[(order - first) % 2 == 0] + 1
    is_quote[targets[targets < len(part)]] = False
    return bool(targets[-1] == len(part))
