"""The model's vocabulary as llguidance needs it, and whether it takes a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mamba_eagle.constrain.grammar import Grammar
from mamba_eagle.constrain.schema import blamed
from mamba_eagle.hub import is_gguf

# A grammar of reasonable size needs far less. Lexer fuel is spent at about 50,000 per millisecond
# when a grammar is built, and 14,000 per millisecond when a mask is computed.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
REMEMBERED = 512  # grammars whose verdict is kept


class NoVocabulary(RuntimeError):
    """There is no tokenizer that grammars could be matched with; says why."""


class Vocabulary:
    """Token ids and their bytes. Safe to use from several threads.

    size: of the logits, padding included: padding has no bytes, so no grammar allows it. eos: all
    tokens that end a text; one is needed.

    Raises: NoVocabulary
    """

    def __init__(self, tokenizer: Any, size: int, eos: Sequence[int]) -> None:
        """tokenizer: the text of a tokenizer.json, or an object with ``tokens`` (bytes by id) as
        llguidance's TokenizerWrapper has them."""
        if not eos:
            raise NoVocabulary(
                "the model's config.json names no eos_token_id, and without one a constrained "
                "text could not end"
            )
        try:
            self.tokens = LLTokenizer(tokenizer, n_vocab=size, eos_token=list(eos))
        except Exception as error:  # llguidance raises whatever its Rust side says
            raise NoVocabulary(f"llguidance cannot read this tokenizer: {error}") from None
        self.size, self.eos = size, tuple(eos)
        self.special = _special_tokens(tokenizer) if isinstance(tokenizer, str) else {}
        self._problem = lru_cache(REMEMBERED)(self._tried)

    @property
    def words(self) -> int:
        """32-bit words of one mask."""
        return (self.size + 31) // 32

    def matcher(self, text: str) -> LLMatcher:
        """At the start of the grammar ``text``; what is wrong with it is ``get_error()``."""
        return LLMatcher(self.tokens, text, log_level=0, limits=LIMITS)

    def problem(self, grammar: Grammar) -> tuple[str, str]:
        """Why the grammar cannot be served, and the path of what is to blame in a schema; two
        empty texts if it can. Takes as long as compiling it: call it off the event loop."""
        message = self._problem(grammar.text)
        if not message:
            return "", ""
        schemas = (part.body for part in grammar.parts() if part.kind == "json_schema")
        paths = (blamed(schema, message) for schema in schemas)
        return message, next(filter(None, paths), "")

    def _tried(self, text: str) -> str:
        matcher = self.matcher(text)
        mask = np.zeros(self.words, dtype=np.uint32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return _own_words(matcher.get_error())
        mask[[token >> 5 for token in self.eos]] &= [
            np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF) for token in self.eos
        ]
        if not mask.any():
            return "nothing but the empty text fits it"
        return ""


def _own_words(message: str) -> str:
    """llguidance's message without what it says of the Lark text, which no client has written."""
    message = " ".join(message.split()).removesuffix("<non-verbose/>").strip()
    message = re.split(r" \d+ \| ", message)[0]
    message = re.sub(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?", "", message)
    return _REASONS.get(message, message)


_REASONS = {
    "NoExtensionBias": "no text fits it",
    "NoExtension": "no text fits it",
    "ParserTooComplex": "it is too ambiguous to be followed: make it simpler",
    "LexerTooComplex": "its patterns are too large to be followed: make them simpler",
}


def _special_tokens(tokenizer: str) -> dict[str, int]:
    """The texts of tokens that no ordinary text is encoded to, by a tokenizer.json."""
    added = json.loads(tokenizer).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token.get("special")}


def read_tokenizer(folder: str) -> str:
    """The tokenizer.json of a folder, with the tokens that tokenizer_config.json adds; or what a
    GGUF file has in its place.

    Raises: NoVocabulary
    """
    if is_gguf(folder):
        # Imported here: few checkpoints need its packages.
        from mamba_eagle.gguf_files.file import open_gguf
        from mamba_eagle.gguf_files.tokenizer import tokenizer_json as of_gguf

        try:
            return of_gguf(open_gguf(folder))
        except (OSError, ValueError) as error:
            raise NoVocabulary(str(error)) from None
    path = Path(folder, "tokenizer.json")
    if path.exists():
        try:
            return _with_added(path.read_text(), path.with_name("tokenizer_config.json"))
        except (OSError, ValueError) as error:
            raise NoVocabulary(f"{path} cannot be read: {error}") from None
    # Imported here: it takes a second, and only few models lack the file.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer_json(tokenizer)
    except (OSError, ValueError) as error:
        raise NoVocabulary(f"{Path(folder)} has no tokenizer that can be read: {error}") from None


def _with_added(text: str, config_path: Path) -> str:
    values = json.loads(text)
    values["padding"] = values["truncation"] = None
    if config_path.exists():
        config = json.loads(config_path.read_text())
        added = values.setdefault("added_tokens", [])
        known = {token["id"] for token in added}
        more = (config.get("added_tokens_decoder") or {}).items()
        added += [{**token, "id": int(id_)} for id_, token in more if int(id_) not in known]
        added.sort(key=lambda token: token["id"])
    return json.dumps(values, ensure_ascii=False)


def tokenizer_json(tokenizer: Any) -> str:
    """The same of a loaded tokenizer of transformers.

    Raises: NoVocabulary if it is not a fast one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoVocabulary("the model has no fast tokenizer (tokenizer.json)")
    values = json.loads(backend.to_str())
    values["padding"] = values["truncation"] = None
    return json.dumps(values, ensure_ascii=False)
