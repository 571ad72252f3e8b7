"""The model's tokenizer: text to ids, and detokenizers.

Encoding and decoding call the Rust tokenizer in ways that release Python's global lock (its
``encode`` and ``decode`` keep it, ``encode_batch_fast`` and ``decode_batch`` do not), so that a
long text in one thread does not hold up the event loop in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

from mamba_eagle.constrain.vocabulary import tokenizer_json
from mamba_eagle.hub import is_gguf
from mamba_eagle.tokenizer.detokenize import Detokenizer, detokenizer_factory

BATCH_TEXTS = 256  # texts and characters of one call: results are made with the lock held
BATCH_CHARACTERS = 2**16


class TextTokenizer:
    """Wraps a fast tokenizer of transformers; encoding is as ``tokenizer.encode(text)`` does it.

    Safe to use from several threads at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.hf = tokenizer
        self._factory = detokenizer_factory(tokenizer)
        self.token_text = self._factory.token_text
        self.token_bytes = self._factory.token_bytes
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        # transformers sets truncation and padding of the Rust tokenizer at each call. Called
        # once, it leaves them off; from here on nothing changes the tokenizer.
        tokenizer.encode("")
        self._backend = tokenizer.backend_tokenizer
        self._special_ids = frozenset(self.special_tokens().values())
        # What a tokenizer.json would hold; takes half a second for 131,072 tokens.
        self.json = cache(partial(tokenizer_json, tokenizer))

    @classmethod
    def load(cls, path: str) -> TextTokenizer:
        """From a folder or a GGUF file; nothing is fetched.

        Raises: OSError or ValueError when it has no fast tokenizer.
        """
        if is_gguf(path):
            # Imported here: few checkpoints need its packages.
            from mamba_eagle.gguf_files.tokenizer import fast_tokenizer

            return cls(fast_tokenizer(path))
        # Imported here: it takes seconds, and the engine loads its weights meanwhile.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("it has no tokenizer.json (a fast tokenizer is needed)")
        return cls(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As ``encode``; where the environment allows it (TOKENIZERS_PARALLELISM), many at once
        on all cores."""
        found: list[list[int]] = []
        for batch in _batches(texts):
            encodings = self._backend.encode_batch_fast(
                batch, add_special_tokens=add_special_tokens
            )
            found += [encoding.ids for encoding in encodings]
        return found

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.decode_all([token_ids], skip_special_tokens)[0]

    def decode_all(
        self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Each list's text, as ``tokenizer.decode(ids)`` gives it."""
        texts: list[str] = self._backend.decode_batch(
            [list(ids) for ids in lists], skip_special_tokens=skip_special_tokens
        )
        if self._cleans_up:
            texts = [self.hf.clean_up_tokenization(text) for text in texts]
        return texts

    @property
    def _cleans_up(self) -> bool:
        """Whether transformers would remove spaces before punctuation: never those of a BPE."""
        asked = bool(getattr(self.hf, "clean_up_tokenization_spaces", False))
        return asked and type(self._backend.model).__name__ != "BPE"

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        kept: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """kept: special tokens that are written even where others are skipped."""
        special = self._special_ids
        skipped = (special - kept if kept else special) if skip_special_tokens else frozenset()
        return self._factory.make(prompt_ids, skipped)

    def special_tokens(self) -> dict[str, int]:
        """The texts of the special tokens, and their ids."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def added_tokens(self) -> dict[str, int]:
        """As ``special_tokens``, with those that are written to texts: families differ in which
        they call special."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order; one that is longer than a batch is a batch of its own."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and (len(batch) == BATCH_TEXTS or characters + len(text) > BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch
