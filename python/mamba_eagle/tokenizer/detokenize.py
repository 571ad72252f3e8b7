"""From token ids to text, one token at a time and with constant work for each.

A character may be spread over several tokens. Its bytes are held back until it is complete, so
that text once given out never changes; ``flush`` gives what is left when a request ends.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so of any longer run of unfinished tokens the first are invalid
# and waiting for them is in vain.
LONGEST_RUN = 12
# How many prompt tokens a decoder sees before the first output token: enough for decoders whose
# text depends on the neighbours (SentencePiece drops the space of a first word).
CONTEXT = 6


def detokenizer_factory(tokenizer: Any) -> ByteLevelFactory | WindowFactory:
    """The way to decode that fits a fast tokenizer of transformers."""
    if type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel":
        return ByteLevelFactory(tokenizer)
    return WindowFactory(tokenizer)


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
        self._tables = {frozenset[int](): self.all_bytes}  # by the tokens skipped

    def make(self, prompt_ids: Sequence[int], skipped: frozenset[int]) -> Detokenizer:
        """skipped: tokens that have no text, some of the special ones."""
        table = self._tables.get(skipped)
        if table is None:
            table = self._tables[skipped] = list(self.all_bytes)
            for token_id in skipped:
                table[token_id] = b""
        return ByteLevelDetokenizer(table)

    def token_bytes(self, token_id: int) -> bytes:
        # A model's vocabulary may be padded beyond the tokenizer's.
        return self.all_bytes[token_id] if token_id < len(self.all_bytes) else b""

    def token_text(self, token_id: int) -> str:
        """One token alone, special tokens included; for logprobs."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class ByteLevelDetokenizer:
    """The text of one sample."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" if it ends inside a character."""
        table = self._table
        return self._decode(table[token_id]) if token_id < len(table) else ""

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD; the request has ended."""
        return self._decode(b"", True)


# ── any other tokenizer: decode a short window and give out what is new ──────────────────────


class WindowFactory:
    """Calls the tokenizer's own decoder, but for byte-fallback tokens: see WindowDetokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.byte_values = byte_fallbacks(tokenizer)
        self.token_text = cache(lambda token_id: self.decode([token_id]))

    def make(self, prompt_ids: Sequence[int], skipped: frozenset[int]) -> Detokenizer:
        return WindowDetokenizer(self.decode, self.byte_values, prompt_ids, skipped)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        value = self.byte_values.get(token_id)
        return bytes([value]) if value is not None else self.token_text(token_id).encode()


def byte_fallbacks(tokenizer: Any) -> dict[int, int]:
    """Token id -> byte, of a vocabulary that spells what it lacks in bytes, as ``<0x0A>``."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None or "ByteFallback" not in _decoder_types(json.loads(decoder.__getstate__())):
        return {}
    found = {}
    for entry, token_id in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).items():
        if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", entry):
            found[token_id] = int(match[1], 16)
    return found


def _decoder_types(state: dict[str, Any]) -> set[str]:
    """The types of a decoder and of those that it is made of."""
    return {state["type"]}.union(*map(_decoder_types, state.get("decoders", ())))


class WindowDetokenizer:
    """The same: ``ids[:known]`` is context whose text is out; ``ids[known:]`` is held back.

    Byte-fallback tokens never enter the window: the tokenizer's decoder takes all neighbouring
    ones for one run, and spoils the whole run if it does not begin and end with a character, as
    part of a prompt or of a text that is still growing may not. Their characters are put
    together here.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_values: dict[int, int],
        prompt_ids: Sequence[int],
        skipped: frozenset[int],
    ) -> None:
        self._decode = decode
        self._byte_values = byte_values
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: list[int] = []  # byte tokens of the character that is not complete yet
        # What a text begins with may lose a space, so it matters whether something came before.
        self._begun = any(token_id not in skipped for token_id in reversed(prompt_ids))
        self._ids = [
            token_id
            for token_id in prompt_ids[-CONTEXT:]
            if token_id not in skipped and token_id not in byte_values
        ]
        self._known = len(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if token_id in self._byte_values:
            return self._take_held() + self._push_byte(token_id)
        before = self._end_run()
        if self._begun and not self._ids:
            # a context for a text of bytes alone: some letter's byte, if the vocabulary has one
            self._ids = [id_ for id_, value in self._byte_values.items() if value == ord("a")]
            self._known = len(self._ids)
        self._ids.append(token_id)
        new = self._held()
        unfinished = new.endswith(REPLACEMENT) or not new
        if unfinished and len(self._ids) - self._known < LONGEST_RUN:
            return before
        return before + self._take_held()

    def flush(self) -> str:
        return self._take_held() + self._end_run()

    # ── tokens of the window ─────────────────────────────────────────────────────────────────

    def _held(self) -> str:
        if len(self._ids) == self._known:
            return ""
        before = self._decode(self._ids[: self._known])
        after = self._decode(self._ids)
        return after[len(before) :]

    def _take_held(self) -> str:
        """What is held back; it becomes the context of what comes next."""
        new = self._held()
        if len(self._ids) > self._known:
            self._begun = True
            self._ids = self._ids[self._known :]
            self._known = len(self._ids)
        return new

    # ── bytes ────────────────────────────────────────────────────────────────────────────────

    def _push_byte(self, token_id: int) -> str:
        self._run.append(token_id)
        text = self._utf8.decode(bytes([self._byte_values[token_id]]))
        return self._completed(text) if text else ""

    def _end_run(self) -> str:
        """No further byte comes: what is incomplete never will be a character."""
        if not self._run:
            return ""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return self._completed(text)

    def _completed(self, text: str) -> str:
        if not self._begun:
            text = self._decode(self._run)  # which may drop the first space
            self._begun = True
        self._run.clear()
        return text


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer
