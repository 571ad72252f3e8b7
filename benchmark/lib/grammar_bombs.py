"""Grammars of some kilobytes that would take for ever to compile or to follow, or all memory.

test/srt/chaos/test_grammar_bombs.py sends them, and benchmark/flood.py says what they do to others.
"""

from __future__ import annotations

import string
from typing import Any

Sampling = dict[str, Any]  # sampling_params


def intersection(count: int, gate: str = "", end: str = "") -> Sampling:
    """A text that fits ``count`` patterns at once: their automaton has 2 ** count states. gate,
    end: around each, so that it begins only there."""
    patterns = [f"{gate}.*{string.ascii_letters[i]}.{{{i}}}{end}" for i in range(count)]
    return {"json_schema": {"allOf": [{"type": "string", "pattern": one} for one in patterns]}}


def _properties(count: int, value: Any) -> Sampling:
    return {"json_schema": {"type": "object", "properties": {f"p{i}": value for i in range(count)}}}


def _references(count: int) -> Sampling:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"json_schema": {"$defs": {**chain, f"a{count}": {}}, "$ref": "#/$defs/a0"}}


def _choices_of_all(count: int) -> Sampling:
    """2 ** count ways to choose."""
    either = [
        {"anyOf": [{"properties": {f"p{i}": {"const": value}}} for value in (1, 2)]}
        for i in range(count)
    ]
    return {"json_schema": {"type": "object", "allOf": either}}


def _lists(depth: int, count: int) -> Sampling:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": count, "maxItems": count}
    return {"json_schema": schema}


def _chain(count: int) -> Sampling:
    rules = [f'r{i} ::= "x{i}" r{i + 1}' for i in range(count)]
    return {"ebnf": "\n".join(["root ::= r0", *rules, f'r{count} ::= "e"'])}


def _ring(count: int) -> Sampling:
    any_of = " | ".join(f"r{i}" for i in range(count))
    rules = [f'r{i} ::= "x{i}" r{(i + 1) % count}' for i in range(count)]
    return {"ebnf": "\n".join([f"root ::= {any_of}", *rules])}


def _all_of(*patterns: str) -> Sampling:
    return {"ebnf": "start: T\nT: " + " & ".join(f"/{pattern}/" for pattern in patterns)}


def _ends(begin: str) -> list[str]:
    return [f"{begin}(?s:.*){string.ascii_letters[i]}.{{{i}}}" for i in range(24)]


GRAMMAR_BOMBS: dict[str, Sampling] = {
    "schema: 14 patterns at once": intersection(14),
    "schema: 18 patterns at once": intersection(18),
    "schema: 24 patterns at once": intersection(24),
    "schema: 24 patterns behind a gate": intersection(24, "^(q{0,30}z|q{30}", ")$"),
    "schema: 660 properties": _properties(660, {"type": "integer"}),
    "schema: 2,500 properties": _properties(2500, {"type": "integer"}),
    "schema: 2,000 references": _references(2000),
    "schema: 2**16 alternatives": _choices_of_all(16),
    "schema: a million items": {"json_schema": {"type": "array", "minItems": 10**6}},
    "schema: lists of lists": _lists(8, 20),
    "schema: a million characters": {"json_schema": {"type": "string", "minLength": 10**6}},
    "regex: a million characters": {"regex": "a{1000000}"},
    "regex: a thousand thousands": {"regex": "(a{1000}){1000}"},
    "regex: optional, then not": {"regex": "(a?){500}a{500}"},
    "regex: behind a gate": {"regex": "b|(a{1000}){1000}"},
    "regex: 2**1000 states": {"regex": ".*a.{1000}"},
    "regex: 100 times anything": {"regex": "(.*a){100}"},
    "regex: plus of plus": {"regex": "(((a+)+)+)+b"},
    "regex: nested repeats": {"regex": "(" * 12 + "." + "{1,9})" * 12},
    "regex: nested options": {"regex": "((a?b?c?){100}){100}"},
    "regex: letters of all scripts": {"regex": r"\w{1,2000}\p{L}{2000}"},
    "regex: 5,000 alternatives": {"regex": "|".join(f".{{{i}}}x" for i in range(5000))},
    "regex: a range of 100,000": {"regex": "[a-z]{5,100000}z"},
    "ebnf: a ring of 3,000 rules": _ring(3000),
    "ebnf: a chain of 800 rules": _chain(800),
    "ebnf: a chain of 3,000 rules": _chain(3000),
    "ebnf: 3,100 alternatives": {
        "ebnf": "root ::= " + " | ".join(f'"x{i}" [a-z]' for i in range(3100))
    },
    "ebnf: ambiguous": {"ebnf": 'root ::= root root root | "a" | ""'},
    "lark: 24 patterns at once": _all_of(*_ends("")),
    "lark: 24 patterns behind a gate": _all_of(*(f"(z|q{{20}}{end})" for end in _ends(""))),
    "lark: a million repeats": {"ebnf": 'start: (A | "b"){1000000}\nA: /a{0,1000}/'},
}
