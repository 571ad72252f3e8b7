"""From token ids to text, one token at a time and with constant work for each.

A character may be spread over several tokens. Its bytes are held back until it is complete, so
that text once given out never changes; ``flush`` gives what is left when a request ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so of any longer run of unfinished tokens the first are invalid
# and waiting for them is in vain.
LONGEST_RUN = 12
# How many prompt tokens a decoder sees before the first output token: enough to know that the
# output does not begin a text (SentencePiece drops the space of a first word).
CONTEXT = 6


class Detokenizer(Protocol):
    """The text of one sample."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" if it ends inside a character."""
        ...

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD; the request has ended."""
        ...


class DetokenizerFactory(Protocol):
    def make(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer: ...

    def token_text(self, token_id: int) -> str:
        """One token alone, special tokens included; for logprobs."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...


def detokenizer_factory(tokenizer: Any) -> DetokenizerFactory:
    """The way to decode that fits a fast tokenizer of transformers."""
    if type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel":
        return ByteLevelFactory(tokenizer)
    return WindowFactory(tokenizer)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


# ── byte-level BPE: a token is a byte string, whatever stands beside it ──────────────────────


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: which character of a vocabulary entry means which byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class ByteLevelFactory:
    """A table of the vocabulary's bytes; nothing of the tokenizer is called for a token."""

    def __init__(self, tokenizer: Any) -> None:
        alphabet = byte_alphabet()
        vocabulary: dict[str, int] = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
        self.all_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for entry, token_id in vocabulary.items():
            try:
                self.all_bytes[token_id] = bytes([alphabet[char] for char in entry])
            except KeyError:  # an added token is written as it reads
                self.all_bytes[token_id] = entry.encode()
        self.plain_bytes = list(self.all_bytes)
        for token_id in _special_ids(tokenizer):
            self.plain_bytes[token_id] = b""

    def make(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return ByteLevelDetokenizer(self.plain_bytes if skip_special_tokens else self.all_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        # A model's vocabulary may be padded beyond the tokenizer's.
        return self.all_bytes[token_id] if token_id < len(self.all_bytes) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class ByteLevelDetokenizer:
    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        table = self._table
        return self._decode(table[token_id]) if token_id < len(table) else ""

    def flush(self) -> str:
        return self._decode(b"", True)


# ── any other tokenizer: decode a short window and give out what is new ──────────────────────


class WindowFactory:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special_ids = _special_ids(tokenizer)

    def make(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self.decode, prompt_ids[-CONTEXT:], skipped)

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class WindowDetokenizer:
    """``ids[:known]`` is context whose text is out; ``ids[known:]`` is held back."""

    def __init__(self, decode: Any, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._ids = [token_id for token_id in context if token_id not in skipped]
        self._known = len(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        new = self._held()
        unfinished = new.endswith(REPLACEMENT) or not new
        if unfinished and len(self._ids) - self._known < LONGEST_RUN:
            return ""
        # What was just given out is the context of what comes next.
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return new

    def flush(self) -> str:
        return self._held()

    def _held(self) -> str:
        before: str = self._decode(self._ids[: self._known])
        after: str = self._decode(self._ids)
        return after[len(before) :]
