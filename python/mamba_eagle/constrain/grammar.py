"""Builds grammar texts for llguidance: the one form in which constraints travel.

    json_schema_grammar({"type": "integer"}).text        # goes into SamplingParams.grammar
    lark_grammar(f'start: "x=" @{number.name}', number)  # own rules around another grammar

A ``Grammar`` is immutable and only text: nothing is compiled here. Whether llguidance takes it is
asked of a vocabulary (``Vocabulary.problem``), since special tokens and limits matter.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.schema import checked_schema, limit_length
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_CHOICES

ANY_TEXT = r"/(.|\n)*/"  # Lark: text without special tokens
SPACES = r"/[ \t\r\n]{0,8}/"  # Lark: what may stand between reasoning and answer
OPTIONS = "%llguidance {}\n"
Special = Mapping[str, int] | None  # special tokens by their texts


@dataclass(frozen=True)
class Grammar:
    """A grammar that starts in ``body`` and may refer to those in ``uses`` as ``@name``."""

    kind: str  # lark_grammar, json_schema or ebnf
    body: str  # Lark's text, a schema as JSON, or GBNF or Lark of a client's
    uses: tuple[Grammar, ...] = ()

    @cached_property
    def name(self) -> str:
        """What other Lark texts call it: equal grammars have equal names."""
        parts = (self.kind, self.body, *(used.name for used in self.uses))
        return "g" + hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def text(self) -> str:
        """What llguidance reads, and what ``SamplingParams.grammar`` carries.

        Raises: GrammarError for an ebnf that cannot be read. Many rules take seconds.
        """
        every = {part.name: part for part in self.parts()}
        texts = (part._json(first=part is self) for part in every.values())
        return f'{{"grammars": [{", ".join(texts)}]}}'

    def parts(self) -> Iterator[Grammar]:
        """Itself, then all that it uses, directly or not; some may come twice."""
        yield self
        for used in self.uses:
            yield from used.parts()

    def _json(self, first: bool) -> str:
        name = "" if first else f'"name": "{self.name}", '
        if self.kind == "json_schema":
            return f'{{{name}"json_schema": {self.body}}}'
        lark = _lark_of(self.body) if self.kind == "ebnf" else self.body
        return f'{{{name}"lark_grammar": {json.dumps(lark)}}}'


# ── the kinds of constraints ─────────────────────────────────────────────────────────────────


def json_schema_grammar(
    schema: str | Mapping[str, Any] | bool, whitespace: str | None = None
) -> Grammar:
    """JSON that fits a schema, given as JSON text or decoded.

    whitespace: a regex of what may stand between any two JSON tokens; "": nothing may; None: one
    blank behind each comma and colon, or none.

    Raises: GrammarError
    """
    return Grammar("json_schema", checked_schema(schema, whitespace))


def regex_grammar(pattern: str) -> Grammar:
    """Text that matches the whole pattern, in the syntax of Rust's regex crate (no look-around, no
    back-references).

    Raises: GrammarError
    """
    _readable(pattern, "pattern")
    return Grammar("lark_grammar", f"start: TEXT\nTEXT: {regex_literal(pattern)}\n")


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """One of some texts.

    Raises: GrammarError
    """
    if not choices:
        raise GrammarError("the list has no choice: give one at least")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"{len(choices)} choices are more than the limit of {MAX_CHOICES}")
    for choice in choices:
        _readable(choice, "choice")
    # As one terminal: as rules each would be one more way to go on.
    return Grammar("lark_grammar", f"start: TEXT\nTEXT: {' | '.join(map(quoted, choices))}\n")


def ebnf_grammar(text: str) -> Grammar:
    """A grammar of the client's: GBNF (``root ::= …``), or Lark as llguidance reads it
    (``start: …``). Which one, and whether it can be read, is seen when its text is asked for.

    Raises: GrammarError
    """
    _readable(text, "grammar")
    return Grammar("ebnf", text)


def lark_grammar(text: str, *uses: Grammar) -> Grammar:
    """Rules of our own, from ``start:`` on. ``uses``: the grammars that it names as ``@name``."""
    return Grammar("lark_grammar", OPTIONS + text + "\n", uses)


# ── putting them together ────────────────────────────────────────────────────────────────────


def text_grammar(text: str, special: Special = None) -> Grammar:
    """Exactly this text; what ``special`` names in it are those special tokens."""
    return lark_grammar(f"start: {literal(text, special)}")


def sequence(*parts: Grammar) -> Grammar:
    """One after the other."""
    return lark_grammar("start: " + " ".join(f"@{part.name}" for part in parts), *parts)


def any_of(*parts: Grammar) -> Grammar:
    """One of them."""
    return lark_grammar("start: " + " | ".join(f"@{part.name}" for part in parts), *parts)


# ── pieces of Lark ───────────────────────────────────────────────────────────────────────────


def until(end: str, special: Special, name: str) -> tuple[str, str]:
    """Lark: free text up to and with the first ``end``, and the rules that it needs.

    A special token ends text by itself; an end that is text is found by a lazy lexeme.
    """
    text = f"{name.upper()}_TEXT"
    rule = f"{text}: {ANY_TEXT}\n"
    if special and end in special:
        return f"{text} <[{special[end]}]>", rule
    return name, f"{name}[lazy]: {text} {quoted(end)}\n{rule}"


def literal(text: str, special: Special = None) -> str:
    """Lark: exactly this text, in which the names in ``special`` are those tokens. "" for ""."""
    return " ".join(
        f"<[{special[piece]}]>" if special and piece in special else quoted(piece)
        for piece in _pieces(text, special or ())
        if piece
    )


def _pieces(text: str, names: Collection[str]) -> Iterator[str]:
    """The text, cut before and behind each name; of names that begin alike the longest counts."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    start = at = 0
    while at < len(text):
        name = next((name for name in longest_first if text.startswith(name, at)), None)
        if name is None:
            at += 1
            continue
        yield from (text[start:at], name)
        start = at = at + len(name)
    yield text[start:]


def quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def regex_literal(pattern: str) -> str:
    """A Lark regex: slashes and line ends do not end it."""
    out, escaped = [], False
    for char in pattern:
        if char == "\n":
            # also behind a backslash it stands for itself
            out.append("n" if escaped else "\\n")
        elif char == "/" and not escaped:
            out.append("\\/")
        else:
            out.append(char)
        escaped = char == "\\" and not escaped
    return "/" + "".join(out) + "/"


def text_pattern(text: str) -> str:
    """A part of a regex of Lark: this text. Slashes and line ends do not end it."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _lark_of(text: str) -> str:
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        first = str(error).partition("\n")[0]
        raise GrammarError(f"neither GBNF (root ::= ...) nor Lark (start: ...): {first}") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply: write it flatter") from None
    except Exception as error:  # the converter raises plain Exceptions, such as for unknown rules
        raise GrammarError(f"it cannot be read as GBNF: {shown(str(error))}") from None


def _readable(text: str, what: str) -> None:
    """Raises: GrammarError for what no grammar may be."""
    if not text:
        raise GrammarError(f"the {what} is empty: leave the field out, or say what may be written")
    if "\0" in text:
        raise GrammarError(f"the {what} has a NUL character, which no text can have: remove it")
    limit_length(text, f"the {what}")
