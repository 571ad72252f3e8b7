"""The model's vocabulary as llguidance needs it, and whether it takes a grammar."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mamba_eagle.constrain.grammar import Grammar
from mamba_eagle.constrain.schema import blamed, refuse_endless
from mamba_eagle.hub import is_gguf
from mamba_eagle.limits import MAX_GRAMMAR_ITEMS, MAX_LEXER_STATES

# A grammar of reasonable size needs far less. Lexer fuel is spent at about 50,000 per millisecond
# when a grammar is built, and 14,000 per millisecond when a mask is computed.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=MAX_GRAMMAR_ITEMS,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=200_000,
    verbose_errors=False,
)
TEXTS, STEPS = 2, 24  # that a grammar is tried with, in tokens


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
            if isinstance(tokenizer, str):
                tokenizer = _within(tokenizer, size)
            self.tokens = LLTokenizer(tokenizer, n_vocab=size, eos_token=list(eos))
        except Exception as error:  # llguidance raises whatever its Rust side says
            raise NoVocabulary(f"llguidance cannot read this tokenizer: {error}") from None
        self.size, self.eos = size, tuple(eos)
        self.words = (size + 31) // 32  # of one mask, of 32 bits each

    def matcher(self, text: str) -> LLMatcher:
        """One at the start of the grammar ``text``; what is wrong with it is ``get_error()``."""
        return LLMatcher(self.tokens, text, log_level=0, limits=LIMITS)

    def problem(self, grammar: Grammar) -> tuple[str, str]:
        """Why the grammar cannot be served, and the path of what is to blame in a schema; two
        empty texts if it can. Takes as long as the grammar wants, and some steps of it.

        Raises: GrammarError
        """
        text = grammar.text
        schemas = [part.body for part in grammar.parts() if part.kind == "json_schema"]
        for schema in schemas:
            refuse_endless(schema)
        message = self._tried(text)
        paths = (blamed(schema, message) for schema in schemas) if message else ()
        return message, next(filter(None, paths), "")

    def _tried(self, text: str) -> str:
        """Does what the runner will do: builds a matcher, and follows two random texts."""
        base = self.matcher(text)
        if base.is_error():
            return own_words(base.get_error())
        for seed in range(TEXTS):
            matcher, random = base.deep_copy(), Random(seed)
            for step in range(STEPS):
                mask = self._mask(matcher)
                if matcher.is_error():
                    return own_words(matcher.get_error())
                if not len(mask):
                    if not step:
                        return "nothing but the empty text fits it"
                    break
                # the lowest ids are mostly single bytes, such as what ends a string
                token = int(random.choice(mask[:8] if step % 2 else mask))
                matcher.try_consume_tokens([token])
                if not matcher.is_error():
                    matcher.compute_ff_tokens()
        return ""

    def _mask(self, matcher: LLMatcher) -> npt.NDArray[np.int64]:
        """The tokens that may follow and end nothing."""
        words = np.zeros(self.words, dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return tokens[~np.isin(tokens, self.eos)]


class _WithAdded(msgspec.Struct):
    added_tokens: list[dict[str, Any]] = []


def _within(text: str, size: int) -> str:
    """Without added tokens that the logits lack, which llguidance refuses: transformers adds some
    to what a folder lists."""
    added = msgspec.json.decode(text, type=_WithAdded).added_tokens
    kept = [token for token in added if token["id"] < size]
    return text if kept == added else json.dumps({**json.loads(text), "added_tokens": kept})


def own_words(message: str) -> str:
    """llguidance's message without what it says of the Lark text, which no client has written."""
    message = " ".join(message.split()).removesuffix("<non-verbose/>").strip()
    message = re.split(r" \d+ \| ", message)[0]
    message = re.sub(r"^(Parser Error|lexer error): ", "", message)
    message = re.sub(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?", "", message)
    for begin, reason in _REASONS.items():
        if message.startswith(begin):
            return reason
    return message


SIMPLER = "to be followed: make it simpler"
_REASONS = {
    "NoExtensionBias": "no text fits it",
    "NoExtension": "no text fits it",
    "ParserTooComplex": f"it is too ambiguous {SIMPLER}",
    "LexerTooComplex": f"its patterns are too large {SIMPLER}",
    "too many expressions constructed": f"its patterns take too many steps {SIMPLER}",
    "fuel exhausted": f"its patterns take too many steps {SIMPLER}",
    "too many states": f"its patterns have more than {MAX_LEXER_STATES} states: make them simpler",
    "Current row has": f"it has more than {MAX_GRAMMAR_ITEMS} ways to go on at one place, counted "
    "in parts of alternatives and four to an optional property: split it",
    "Too many items": f"it is too ambiguous {SIMPLER}",
}


def read_tokenizer(folder: str) -> str:
    """The tokenizer.json of a folder, with the tokens that tokenizer_config.json adds; or what a
    GGUF file has in its place.

    Raises: NoVocabulary
    """
    if is_gguf(folder):
        # Imported here: few checkpoints need its packages.
        from mamba_eagle.gguf_files.file import open_gguf
        from mamba_eagle.gguf_files.tokenizer import rust_tokenizer

        try:
            return str(rust_tokenizer(open_gguf(folder)).to_str())
        except (OSError, ValueError) as error:
            raise NoVocabulary(str(error)) from None
    path = Path(folder, "tokenizer.json")
    if path.exists():
        try:
            return _with_added(path.read_bytes(), path.with_name("tokenizer_config.json"))
        except (OSError, ValueError) as error:
            raise NoVocabulary(f"{path} cannot be read: {error}") from None
    # Imported here: it takes a second, and only few models lack the file.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer_json(tokenizer)
    except (OSError, ValueError) as error:
        raise NoVocabulary(f"{Path(folder)} has no tokenizer that can be read: {error}") from None


def _with_added(read: bytes, config_path: Path) -> str:
    values = json.loads(read)
    values["padding"] = values["truncation"] = None
    if config_path.exists():
        config = json.loads(config_path.read_bytes())
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
