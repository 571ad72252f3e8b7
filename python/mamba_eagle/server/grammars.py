"""Constraints in bodies: every spelling becomes one grammar text, tried on the model's vocabulary.

    sampling_params        regex, json_schema, ebnf, structural_tag, choice
    OpenAI routes          response_format, and the names above beside the other parameters
    everywhere             vLLM's structured_outputs {json, regex, ...} and guided_json, ...

Trying compiles the grammar, so bodies that name a constraint are read off the event loop
(threads.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import (
    Grammar,
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from mamba_eagle.constrain.structural_tag import structural_tag_grammar
from mamba_eagle.constrain.vocabulary import NoVocabulary, Vocabulary
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_CHOICES, MAX_SHOWN
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import Fields, all_of, as_text
from mamba_eagle.server.half_pairs import refuse_half_pairs
from mamba_eagle.tokenizer.text import TextTokenizer

OWN = ("regex", "json_schema", "ebnf", "structural_tag", "choice")
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
NAMES = (*OWN, *GUIDED, "structured_outputs")
ANY_OBJECT = "$$ANY$$"  # how SGLang's clients ask json_schema for any object


class Grammars:
    """What the model's vocabulary says of grammars. Used from several threads."""

    def __init__(
        self, tokenizer: TextTokenizer | None, vocab_size: int, eos_token_ids: list[int]
    ) -> None:
        self._tokenizer, self._size, self._eos = tokenizer, vocab_size, eos_token_ids
        self._lock = Lock()

    @cached_property
    def _loaded(self) -> Vocabulary | NoVocabulary:
        if self._tokenizer is None:
            return NoVocabulary("the server was started with --skip-tokenizer-init")
        try:
            return Vocabulary(self._tokenizer.json(), self._size, self._eos)
        except NoVocabulary as error:
            return error

    @property
    def vocabulary(self) -> Vocabulary:
        """Takes up to a second when it is first asked for.

        Raises: NoVocabulary
        """
        with self._lock:  # cached_property has none
            loaded = self._loaded
        if isinstance(loaded, NoVocabulary):
            raise loaded
        return loaded

    def special(self) -> Mapping[str, int]:
        """The names of special tokens and their ids; {} without a vocabulary."""
        try:
            return self.vocabulary.special
        except NoVocabulary:
            return {}

    def check(self, grammar: Grammar, path: str) -> str:
        """The text for ``SamplingParams.grammar``; path: the field that asked for it.

        Raises: RequestError 400
        """
        try:
            message, inner = self.vocabulary.problem(grammar)
        except NoVocabulary as error:
            raise RequestError(
                f"{path}: this server cannot constrain its output: {error}", param=path
            ) from None
        if message:
            raise refusal(path, inner, message)
        return grammar.text


class _Asked(NamedTuple):
    """A constraint as a client spells it."""

    path: str
    kind: str
    value: Any
    whitespace: str | None = None  # for schemas


def refuse_misplaced(fields: Fields) -> None:
    """Raises: RequestError for constraints beside sampling_params, where /generate ignores them."""
    for name in NAMES:
        if fields.raw(name) not in (None, []):
            raise fields.wrong(name, "belongs in sampling_params")
    refuse_unknown(fields)


def refuse_unknown(fields: Fields) -> None:
    # An empty list asks for nothing; sglang.lang sends one with each request.
    if fields.raw("stop_regex") not in (None, []):
        raise fields.wrong("stop_regex", "is not available in this server; leave the field out")


class Constraint(NamedTuple):
    """path: the field that asked for it."""

    grammar: Grammar
    path: str


def read_grammar(fields: Fields, grammars: Grammars) -> str:
    """The one constraint among the fields, as a grammar text; "" if there is none.

    Raises: RequestError 400 that names the field, and the keyword that is to blame.
    """
    found = read_constraint(fields, grammars)
    return grammars.check(*found) if found is not None else ""


def read_constraint(fields: Fields, grammars: Grammars) -> Constraint | None:
    """The same before the vocabulary was asked.

    Raises: RequestError 400
    """
    refuse_unknown(fields)
    found = [*_own(fields), *_structured(fields), *_response_format(fields)]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(asked.path for asked in found[:2])
        raise RequestError(f"{names}: two constraints at once; send one", param=found[1].path)
    (asked,) = found
    try:
        grammar = _grammar(asked, grammars)
    except GrammarError as error:
        what = "" if error.path else f" = {shown(asked.value)}"
        raise refusal(asked.path + what, error.path, str(error), asked.path) from None
    return Constraint(grammar, asked.path)


def refusal(path: str, inner: str, message: str, param: str = "") -> RequestError:
    """inner: the path of what is to blame within the field."""
    if inner:
        path += "." + cut(inner)
    return RequestError(f"{path}: {cut(message, 400)}", param=param or path)


def cut(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _own(fields: Fields) -> Iterator[_Asked]:
    whitespace = _pattern(fields, "guided_whitespace_pattern")
    for name in OWN:
        if fields.raw(name) not in (None, []):
            yield _Asked(fields.where + name, name, fields.raw(name))
    for name, kind in GUIDED.items():
        if fields.raw(name) is not None:
            yield _Asked(fields.where + name, kind, fields.raw(name), whitespace)


def _structured(fields: Fields) -> Iterator[_Asked]:
    if fields.raw("structured_outputs") is None:
        return
    inner = fields.object("structured_outputs")
    if inner.flag("disable_additional_properties"):
        raise inner.wrong(
            "disable_additional_properties",
            "is not available: write additionalProperties: false in the schema",
        )
    whitespace = _pattern(inner, "whitespace_pattern")
    if inner.flag("disable_any_whitespace"):
        whitespace = ""
    for name, kind in STRUCTURED.items():
        value = inner.raw(name)
        if value is not None and (kind != "json_object" or inner.flag(name)):
            yield _Asked(inner.where + name, kind, value, whitespace)


def _pattern(fields: Fields, name: str) -> str | None:
    return fields.text(name) if fields.raw(name) is not None else None


def _response_format(fields: Fields) -> Iterator[_Asked]:
    """Only the OpenAI routes have it; it is no parameter of /generate."""
    asked = fields.object("response_format")
    kind = asked.raw("type")
    path = asked.where.removesuffix(".")
    if kind is None or kind == "text" or fields.where:
        return
    if kind == "json_object":
        schema = asked.raw("schema")  # as llama.cpp takes it
        own = "json_object" if schema is None else "json_schema"
        yield _Asked(path if schema is None else path + ".schema", own, schema)
    elif kind == "json_schema":
        inner = asked.object("json_schema")
        # some clients send the schema itself
        schema = inner.raw("schema") if "schema" in inner.values else inner.values
        if not schema and schema is not False:
            raise asked.wrong("json_schema", "must have a schema")
        yield _Asked(inner.where + "schema", "json_schema", schema)
    elif kind == "structural_tag":
        yield _Asked(path, "structural_tag", asked.values)
    else:
        raise asked.wrong("type", "must be text, json_object, json_schema or structural_tag")


# ── from values to grammars ──────────────────────────────────────────────────────────────────


def _grammar(asked: _Asked, grammars: Grammars) -> Grammar:
    """Raises: GrammarError"""
    return _MAKERS[asked.kind](asked, grammars)


def _regex(asked: _Asked, grammars: Grammars) -> Grammar:
    return regex_grammar(_string(asked.value))


def _ebnf(asked: _Asked, grammars: Grammars) -> Grammar:
    return ebnf_grammar(_string(asked.value))


def _json_schema(asked: _Asked, grammars: Grammars) -> Grammar:
    if asked.value == ANY_OBJECT:
        return json_object_grammar()
    if isinstance(asked.value, str):
        _string(asked.value)
    made = json_schema_grammar(asked.value, asked.whitespace)
    if "NaN" in made.body or "Infinity" in made.body:  # perhaps no more than a name or a text
        try:
            json.dumps(asked.value, allow_nan=False)
        except ValueError:
            raise GrammarError("its numbers must be finite") from None
    if as_text(made.body) is None:
        refuse_half_pairs({asked.path: asked.value})
    return made


def _json_object(asked: _Asked, grammars: Grammars) -> Grammar:
    return json_schema_grammar({"type": "object"}, asked.whitespace)


def _choice(asked: _Asked, grammars: Grammars) -> Grammar:
    if isinstance(asked.value, list) and len(asked.value) > MAX_CHOICES:
        raise GrammarError(f"{len(asked.value)} choices are more than the limit of {MAX_CHOICES}")
    choices = all_of(asked.value, as_text)
    if choices is None:
        raise GrammarError("must be a list of strings")
    return choice_grammar(choices)


def _structural_tag(asked: _Asked, grammars: Grammars) -> Grammar:
    return structural_tag_grammar(asked.value, grammars.special())


_MAKERS: dict[str, Callable[[_Asked, Grammars], Grammar]] = {
    "regex": _regex,
    "ebnf": _ebnf,
    "json_schema": _json_schema,
    "json_object": _json_object,
    "choice": _choice,
    "structural_tag": _structural_tag,
}


def _string(value: Any) -> str:
    text = as_text(value)
    if text is None:
        raise GrammarError("must be a string of valid Unicode")
    return text
