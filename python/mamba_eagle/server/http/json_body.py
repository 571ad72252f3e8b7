"""A body's bytes become a dict of Python values, in pieces that hold up no other request.

First they are counted: a body of a few MiB can hold millions of empty lists, which take seconds
and gigabytes to decode while no other Python code runs. The scan takes numpy's time instead, which
other threads do not wait for, and does not say whether the text is valid.
"""

import json
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mamba_eagle import limits
from mamba_eagle.core import shown
from mamba_eagle.server.errors import RequestError

SLICE = 2**17  # bytes scanned at a time
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")


# At a depth of some 900 readers of values begin to fail: Python's own stack has a limit.
TOO_DEEP = (
    f"has arrays and objects more than {limits.MAX_JSON_DEPTH} deep within each other: flatten it"
)


class Counts(NamedTuple):
    containers: int  # arrays and objects
    strings: int  # keys included
    items: int  # commas and containers: no fewer than there are items
    depth: int  # of containers within each other

    @property
    def problem(self) -> str:
        """Which limit the text exceeds, as the end of a sentence; "" if none."""
        for name, most, count in (
            ("arrays and objects", limits.MAX_JSON_CONTAINERS, self.containers),
            ("strings, keys included,", limits.MAX_JSON_STRINGS, self.strings),
            ("items", limits.MAX_JSON_ITEMS, self.items),
        ):
            if count > most:
                return f"has {count} {name} but may have at most {most}: send fewer at a time"
        return TOO_DEEP if self.depth > limits.MAX_JSON_DEPTH else ""

    @property
    def many_numbers(self) -> bool:
        """So many that only token ids can be meant."""
        return self.items - self.strings > limits.MAX_JSON_NUMBERS


def scan(text: bytes) -> Counts:
    """Counts outside of strings."""
    data = np.frombuffer(text, np.uint8)
    containers = quotes = commas = depth = deepest = 0
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
        # '[' and '{' differ in one bit, as ']' and '}'; no other byte is mapped on these.
        begins, ends = (((part | 0x20) == ord(one)) & outside for one in "{}")
        steps = (begins.view(np.int8) - ends.view(np.int8))[begins | ends]
        if len(steps):
            depths = depth + np.cumsum(steps, dtype=np.int64)
            depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
        containers += int(np.count_nonzero(begins))
        commas += int(np.count_nonzero((part == _COMMA) & outside))
        quotes += int(np.count_nonzero(is_quote))
    return Counts(containers, (quotes + 1) // 2, commas + containers, deepest)


def problem_of(text: bytes) -> str:
    """Which limit a text exceeds, as ``Counts.problem``; most are short, with few brackets."""
    if len(text) > UNSCANNED:
        return scan(text).problem
    brackets = text.count(b"[") + text.count(b"{")
    too_deep = brackets > limits.MAX_JSON_DEPTH and scan(text).depth > limits.MAX_JSON_DEPTH
    return TOO_DEEP if too_deep else ""


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


UNSCANNED = 2**14  # bytes: the worst of this length take 5 ms
PIECE = 2**16  # bytes of token ids decoded at a time
# Lists of token ids, of any route: they may hold more numbers than other fields.
TOKEN_FIELDS = frozenset(
    "input input_ids items label_token_ids prompt query token_ids token_ids_logprob tokens".split()
)

# Without the hook msgspec takes 20 times as long for numbers of many digits.
_decode = msgspec.json.Decoder(float_hook=float).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode_object(body: bytes) -> dict[str, Any]:
    """An empty body counts as {}.

    Raises: RequestError 400
    """
    if not body.strip():
        return {}
    if len(body) > UNSCANNED:
        counts = scan(body)
        if counts.problem:
            raise RequestError(f"the body {counts.problem}")
        if counts.many_numbers:
            fields = decode_fields(body)
            return {name: _decode_field(name, bytes(raw)) for name, raw in fields.items()}
    elif problem := problem_of(body):
        raise RequestError(f"the body {problem}")
    value = decode_whole(body)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {shown(value)}")
    return value


def decode_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """An object whose values stay JSON. Raises: RequestError 400"""
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from None


def decode_whole(body: bytes) -> Any:
    """Raises: RequestError 400"""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            # Takes NaN and Infinity, which the readers of fields then refuse by name.
            if len(body) <= UNSCANNED:
                return json.loads(body)
        except ValueError:
            pass
        raise _not_json(error) from None


def _not_json(error: Exception) -> RequestError:
    return RequestError(f"the body is not valid JSON: {error}")


def _decode_field(name: str, text: bytes) -> Any:
    if len(text) > UNSCANNED and scan(text).many_numbers:
        if name not in TOKEN_FIELDS or b'"' in text or b"{" in text:
            raise RequestError(
                f"{shown(name)[1:-1]}: has more numbers than any field but a list of token ids "
                "may have: send fewer",
                param=name,
            )
        return decode_token_ids(text)
    return decode_whole(text)


def decode_token_ids(text: bytes) -> list[Any]:
    """A valid JSON array of numbers, or of arrays of numbers, however long."""
    at, end = text.index(b"[") + 1, text.rindex(b"]")
    last = b"," if text.find(b"[", at) < 0 else b"]"  # of a piece: items must stay whole
    found: list[Any] = []
    while at < end:
        stop = text.find(last, at + PIECE, end) + 1 or end
        begin = text.rfind(b"[", at, stop)
        # An inner array that is longer than a piece is decoded by itself.
        long = 0 <= begin < stop - PIECE
        items = text[at : begin if long else stop].strip(b", \t\r\n")
        found += decode_whole(b"[" + items + b"]")
        if long:
            found.append(decode_token_ids(text[begin:stop]))
        at = stop
    return found
