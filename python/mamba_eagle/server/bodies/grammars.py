"""Constraints in bodies: every spelling becomes one grammar text, tried on the model's vocabulary.

    sampling_params        regex, json_schema, ebnf, structural_tag, choice
    OpenAI routes          response_format, and the names above beside the other parameters
    everywhere             vLLM's structured_outputs {json, regex, ...} and guided_json, ...

Trying compiles the grammar, which may never end, so it is done elsewhere (grammar_trials.py).
A body with a grammar that was not tried recently is read twice: the first time ``Untried`` ends it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from threading import Lock
from typing import Annotated, Any, NamedTuple

from llguidance import LLMatcher
from pydantic import Field

from mamba_eagle.config import ServerConfig
from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import (
    Grammar,
    choice_grammar,
    ebnf_grammar,
    json_schema_grammar,
    regex_grammar,
)
from mamba_eagle.constrain.structural_tag import structural_tag_grammar
from mamba_eagle.constrain.trials import Verdict
from mamba_eagle.constrain.vocabulary import own_words
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_CHOICES
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.grammar_trials import Judge
from mamba_eagle.server.bodies.kinds import Body, Flag, Text, refuse_half_pairs, says
from mamba_eagle.server.errors import RequestError, cut
from mamba_eagle.tokenizer.text import TextTokenizer

OWN = ("regex", "json_schema", "ebnf", "structural_tag", "choice")
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
NAMES = (*OWN, *GUIDED, "structured_outputs")
REMEMBERED = 256  # grammars whose verdict is kept, with their texts
ANY_OBJECT = "$$ANY$$"  # how SGLang's clients ask json_schema for any object

ANY_SCHEMA = kinds.any_of({"type": "object"}, kinds.STRING, {"type": "boolean"})
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
RESPONSE_FORMAT = kinds.Kind(
    kinds.OBJECT.convert,
    kinds.OBJECT.must,
    {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": list(FORMATS)},
            "json_schema": {
                "type": "object",
                "properties": {"name": kinds.STRING, "schema": ANY_SCHEMA},
            },
            "schema": ANY_SCHEMA,
        },
    },
)
# Their values are read by the grammars' makers, whose refusals say more.
TEXT_VALUE = kinds.untouched(kinds.STRING)
SCHEMA_VALUE = kinds.untouched(ANY_SCHEMA)
TAG_VALUE = kinds.untouched(kinds.any_of({"type": "object"}, kinds.STRING))
CHOICES_VALUE = kinds.untouched({**kinds.list_of(kinds.STRING), "maxItems": MAX_CHOICES})


class Structured(Body):
    json_: Annotated[Any, SCHEMA_VALUE, Field(alias="json")] = says("a JSON schema, or one as text")
    regex: Annotated[Any, TEXT_VALUE] = says("as regex")
    choice: Annotated[Any, CHOICES_VALUE] = says("as choice")
    grammar: Annotated[Any, TEXT_VALUE] = says("as ebnf")
    json_object: Flag = says("any JSON object", False)
    structural_tag: Annotated[Any, TAG_VALUE] = says("as structural_tag")
    whitespace_pattern: Text | None = says("as guided_whitespace_pattern")
    disable_any_whitespace: Flag = says("of json: none between its tokens", False)

    REFUSED = known.STRUCTURED
    HARMLESS = frozenset(("disable_fallback",))


class Constrained(Body):
    """Of all routes that sample: at most one of them."""

    regex: Annotated[Any, TEXT_VALUE] = says("a regular expression that the whole output matches")
    json_schema: Annotated[Any, SCHEMA_VALUE] = says("a JSON schema, or one as text")
    ebnf: Annotated[Any, TEXT_VALUE] = says("a grammar in GBNF or Lark")
    structural_tag: Annotated[Any, TAG_VALUE] = says("free text with constrained parts")
    choice: Annotated[Any, CHOICES_VALUE] = says("one of these texts")
    guided_json: Annotated[Any, SCHEMA_VALUE] = says("as json_schema")
    guided_regex: Annotated[Any, TEXT_VALUE] = says("as regex")
    guided_choice: Annotated[Any, CHOICES_VALUE] = says("as choice")
    guided_grammar: Annotated[Any, TEXT_VALUE] = says("as ebnf")
    guided_whitespace_pattern: Text | None = says(
        'of JSON: a regex of what may stand between its tokens; "": nothing; without it a blank '
        "after each comma and colon at most, or what `--constrained-json-whitespace-pattern` says"
    )
    structured_outputs: Structured | None = says("vLLM's: one of them")

    HARMLESS = known.GUIDED_HARMLESS


class Formatted(Constrained):
    """Of the OpenAI routes."""

    response_format: Annotated[dict[str, Any] | None, RESPONSE_FORMAT] = says("of the output")


# Those that the body which is being read has waited for: they may be more than are remembered.
own_verdicts: ContextVar[Mapping[str, Verdict]] = ContextVar("own_verdicts")


class Untried(Exception):
    """What reads a body needs verdicts on grammars: ``settle``, then read it again."""

    def __init__(self, grammars: Grammars, unknown: Sequence[Grammar]) -> None:
        super().__init__(f"{len(unknown)} grammars are to be tried")
        self._grammars, self._unknown = grammars, unknown

    async def settle(self) -> dict[str, Verdict]:
        """By the grammars' names. Cancelling it ends the work. Raises: RequestError 503"""
        return {one.name: await self._grammars.settle(one) for one in self._unknown}


class Grammars:
    """What the model's vocabulary says of grammars. ``check`` is called from several threads."""

    def __init__(
        self, tokenizer: TextTokenizer | None, judge: Judge, whitespace: str | None = None
    ) -> None:
        """whitespace: of schemas whose request says nothing of it, as in ``json_schema_grammar``"""
        self._tokenizer, self._judge, self.whitespace = tokenizer, judge, whitespace
        self._known: OrderedDict[str, Verdict] = OrderedDict()  # by name, the latest at the end
        self._lock = Lock()

    @cached_property
    def special(self) -> Mapping[str, int]:
        """The names of special tokens and their ids; {} without a tokenizer."""
        return self._tokenizer.special_tokens() if self._tokenizer is not None else {}

    def check(self, grammar: Grammar, path: str) -> str:
        """The text for ``SamplingParams.grammar``; path: the field that asked for it.

        Raises: RequestError 400; Untried
        """
        return self.check_all([(grammar, path)])[0]

    def check_all(self, asked: Sequence[tuple[Grammar, str]]) -> list[str]:
        """The same for several.

        Raises: RequestError 400 for the first that cannot be served; Untried
        """
        if self._tokenizer is None and asked:
            raise RequestError(
                f"{asked[0][1]}: this server cannot constrain its output: the server was started "
                "with --skip-tokenizer-init",
                param=asked[0][1],
            )
        with self._lock:
            known = {**self._known, **own_verdicts.get({})}
        verdicts = [known.get(grammar.name) for grammar, _ in asked]
        unknown = [grammar for (grammar, _), verdict in zip(asked, verdicts) if verdict is None]
        if unknown:
            raise Untried(self, unknown)
        texts = []
        for (grammar, path), verdict in zip(asked, verdicts):
            if verdict is not None:
                if verdict.message:
                    raise refusal(path, verdict.path, verdict.message)
                texts.append(verdict.text or grammar.text)
        return texts

    async def settle(self, grammar: Grammar) -> Verdict:
        """Learn the verdict, unless it is known."""
        if (known := self._known.get(grammar.name)) is not None:
            return known
        verdict = await self._judge.verdict(grammar)
        with self._lock:
            self._known[grammar.name] = verdict
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return verdict


class _Asked(NamedTuple):
    """A constraint as a client spells it."""

    path: str
    kind: str
    value: Any


class Constraint(NamedTuple):
    """path: the field that asked for it."""

    grammar: Grammar
    path: str


def read_grammar(body: Constrained, grammars: Grammars, where: str = "") -> str:
    """The one constraint of a body, as a grammar text; "" if there is none. where: the path of the
    object that it stands in.

    Raises: RequestError 400 that names the field, and the keyword that is to blame.
    """
    return read_grammars([body], grammars, [where])[0]


def read_grammars(
    bodies: Sequence[Constrained], grammars: Grammars, places: Sequence[str]
) -> list[str]:
    """The same of several: what is not known of any of them is asked for at once."""
    found = [read_constraint(body, grammars, where) for body, where in zip(bodies, places)]
    texts = iter(grammars.check_all([one for one in found if one is not None]))
    return [next(texts) if one is not None else "" for one in found]


def read_constraint(body: Constrained, grammars: Grammars, where: str = "") -> Constraint | None:
    """The same, before the vocabulary is asked.

    Raises: RequestError 400
    """
    found = [*_own(body, where), *_structured(body.structured_outputs, where)]
    if isinstance(body, Formatted) and body.response_format is not None:
        found += _response_format(body.response_format)
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(asked.path for asked in found[:2])
        raise RequestError(f"{names}: two constraints at once; send one", param=found[1].path)
    (asked,) = found
    try:
        grammar = _made(asked, body, grammars)
    except GrammarError as error:
        what = "" if error.path else f" = {shown(asked.value)}"
        raise refusal(asked.path + what, error.path, str(error), asked.path) from None
    return Constraint(grammar, asked.path)


def refusal(path: str, inner: str, message: str, param: str = "") -> RequestError:
    """inner: the path of what is to blame within the field."""
    if inner:
        path += "." + cut(inner)
    return RequestError(f"{path}: {cut(message, 400)}", param=param or path)


def _own(body: Constrained, where: str) -> Iterator[_Asked]:
    for name in OWN:
        if getattr(body, name) not in (None, []):
            yield _Asked(where + name, name, getattr(body, name))
    for name, kind in GUIDED.items():
        if getattr(body, name) is not None:
            yield _Asked(where + name, kind, getattr(body, name))


def whitespace_problems(config: ServerConfig) -> list[str]:
    """Why --constrained-json-whitespace-pattern cannot be used."""
    if not (pattern := config.constrained_json_whitespace_pattern):
        return []
    wrong = own_words(LLMatcher.validate_grammar(json_schema_grammar(True, pattern).text))
    return [f"--constrained-json-whitespace-pattern {shown(pattern)}: {wrong}"] if wrong else []


def _whitespace(body: Constrained, grammars: Grammars) -> str | None:
    """Of JSON: vLLM's inner field counts before the older one, and that before the flag."""
    inner = body.structured_outputs
    if inner is not None and inner.disable_any_whitespace:
        return ""
    given = inner.whitespace_pattern if inner is not None else None
    given = body.guided_whitespace_pattern if given is None else given
    return grammars.whitespace if given is None else given


def _structured(inner: Structured | None, where: str) -> Iterator[_Asked]:
    if inner is None:
        return
    for name, kind, value in (
        ("json", "json_schema", inner.json_),
        ("regex", "regex", inner.regex),
        ("choice", "choice", inner.choice),
        ("grammar", "ebnf", inner.grammar),
        ("json_object", "json_object", inner.json_object or None),
        ("structural_tag", "structural_tag", inner.structural_tag),
    ):
        if value is not None:
            yield _Asked(f"{where}structured_outputs.{name}", kind, value)


def _response_format(asked: Mapping[str, Any]) -> Iterator[_Asked]:
    path, kind = "response_format", asked.get("type")
    if kind == "json_object":
        schema = asked.get("schema")  # as llama.cpp takes it
        own = "json_object" if schema is None else "json_schema"
        yield _Asked(path if schema is None else path + ".schema", own, schema)
    elif kind == "json_schema":
        given = asked.get("json_schema")
        inner = kinds.OBJECT.take({} if given is None else given, f"{path}.json_schema")
        # some clients send the schema itself
        schema = inner.get("schema") if "schema" in inner else inner
        if not schema and schema is not False:
            raise RequestError.about(f"{path}.json_schema", given, "must have a schema")
        yield _Asked(f"{path}.json_schema.schema", "json_schema", schema)
    elif kind == "structural_tag":
        yield _Asked(path, "structural_tag", asked)
    elif kind not in (None, "text"):
        remedy = f"must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise RequestError.about(f"{path}.type", kind, remedy)


# ── from values to grammars ──────────────────────────────────────────────────────────────────


def _made(asked: _Asked, body: Constrained, grammars: Grammars) -> Grammar:
    """Raises: GrammarError"""
    value, kind = asked.value, asked.kind
    if kind == "json_object":
        return _json_schema(ANY_OBJECT, asked.path, _whitespace(body, grammars))
    if kind == "json_schema":
        return _json_schema(value, asked.path, _whitespace(body, grammars))
    if kind == "structural_tag":
        return structural_tag_grammar(value, grammars.special)
    if kind == "choice":
        return choice_grammar(_choices(value))
    return (regex_grammar if kind == "regex" else ebnf_grammar)(_string(value))


def _json_schema(value: Any, path: str, whitespace: str | None) -> Grammar:
    if value == ANY_OBJECT:
        value = {"type": "object"}
    if isinstance(value, str):
        _string(value)
    made = json_schema_grammar(value, whitespace)
    if "NaN" in made.body or "Infinity" in made.body:  # perhaps only in a name or a text
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise GrammarError("its numbers must be finite") from None
    if kinds.as_text(made.body) is None:
        refuse_half_pairs({path: value})
    return made


def _choices(value: Any) -> list[str]:
    choices = kinds.all_of(value, kinds.as_text)
    if choices is None:
        raise GrammarError("must be a list of strings")
    return choices


def _string(value: Any) -> str:
    text = kinds.as_text(value)
    if text is None:
        raise GrammarError("must be a string of valid Unicode")
    return text
