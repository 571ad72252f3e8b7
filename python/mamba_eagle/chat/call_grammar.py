"""Grammars of tool calls, made of the same file that calls are read by.

What such a grammar lets through, ``parse`` reads as calls of the given tools with arguments that
fit their schemas. (One exception: where arguments are JSON, a string that holds the very tag that
ends a call. A JSON schema cannot forbid it, and what is read then stays text.)
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mamba_eagle.chat.family import CallForm, Family
from mamba_eagle.chat.schema import Argument, arguments_of, closed, types_of
from mamba_eagle.constrain import grammar
from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.structural_tag import Tag, tagged_grammar

MAX_CALLS = 32  # of one reply that must call: a weak model may find no end


class CallableTool(NamedTuple):
    """``schema`` None: it takes no arguments. ``strict``: its arguments fit the schema, and none
    come that it does not name; otherwise only their form is given."""

    name: str
    schema: Mapping[str, Any] | None
    strict: bool = True


class CallGrammars:
    """For one family; ``special``: the special tokens by their texts.

    Raises: GrammarError if the family's file does not say how calls are written.
    """

    def __init__(self, family: Family, special: grammar.Special = None) -> None:
        if family.calls is None:
            raise GrammarError(
                f"the tool-call format of {family.name} is unknown, so calls cannot be forced: "
                "start the server with --tool-call-parser, or leave it to the model (auto)"
            )
        self.form: CallForm = family.calls
        self.special = special

    def forced(self, tools: Sequence[CallableTool], parallel: bool) -> grammar.Grammar:
        """Calls of these tools and nothing else: one, or with ``parallel`` one or more.

        Raises: GrammarError
        """
        return self._calls(tools, parallel, self.form.begin_all)

    def allowed(self, tools: Sequence[CallableTool], parallel: bool) -> grammar.Grammar:
        """Free text in which what begins like a call is one.

        Raises: GrammarError
        """
        form = self.form
        if form.begin_all:
            trigger = _opening(form.begin_all)
            rest = self._calls(tools, parallel, form.begin_all[len(trigger) :])
            tags = [Tag(trigger, rest, "")]
        else:
            trigger = _opening(form.begin)
            tags = [Tag(self._begin(tool), self.arguments(tool), form.end) for tool in tools]
        return tagged_grammar([trigger], tags, False, not parallel, self.special)

    def arguments(self, tool: CallableTool) -> grammar.Grammar:
        """What stands between the beginning and the end of a call.

        Raises: GrammarError whose path is one in the tool's schema
        """
        schema = closed(tool.schema or {})
        if self.form.arguments == "json":
            return grammar.json_schema_grammar(schema if tool.strict else {"type": "object"})
        if not tool.strict:
            return self._any_tags()
        rules = ""
        parts: list[str] = []
        uses: list[grammar.Grammar] = []
        for i, argument in enumerate(arguments_of(schema)):
            value = _in_tag(argument, self.form, f"v{i}")
            begin = self.form.begin_argument.replace("{key}", argument.name)
            end = self._literal(value.end)
            rules += f"a{i}: {self._literal(begin)} {value.lark} {end}\n{value.rules}"
            parts.append(f"a{i}" + "?" * (not argument.required))
            uses += value.uses
        return grammar.lark_grammar(
            f"start: {' '.join(parts) or grammar.quoted('')}\n{rules}", *uses
        )

    def _any_tags(self) -> grammar.Grammar:
        before, _, behind = self.form.begin_argument.partition("{key}")
        value = _free_text(self.form, "value")
        tag = f"{self._literal(before)} KEY {self._literal(behind)} {value.lark}"
        rules = f"KEY: /[^<>\\n]{{1,64}}/\n{value.rules}"
        return grammar.lark_grammar(f"start: tag*\ntag: {tag} {self._literal(value.end)}\n{rules}")

    def _calls(self, tools: Sequence[CallableTool], parallel: bool, begin: str) -> grammar.Grammar:
        form = self.form
        calls = [self.arguments(tool) for tool in tools]
        options = " | ".join(
            f"{self._literal(self._begin(tool))} @{call.name} {self._literal(form.end)}"
            for tool, call in zip(tools, calls)
        )
        more = f" ({self._literal(form.between)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        start = f"{self._literal(begin)} call{more} {self._literal(form.end_all)}"
        return grammar.lark_grammar(f"start: {start}\ncall: {options}\n", *calls)

    def _begin(self, tool: CallableTool) -> str:
        return self.form.begin.replace("{name}", tool.name)

    def _literal(self, text: str) -> str:
        return grammar.literal(text, self.special)


def opening(form: CallForm) -> str:
    """The tag that a call begins with."""
    return _opening(form.begin_all or form.begin)


def _opening(begin: str) -> str:
    """The tag at the beginning, or all of it."""
    match = re.match(r"<[^<>\n]+>", begin)
    return match[0] if match else begin


# ── one argument in its tag ──────────────────────────────────────────────────────────────────


class _Value(NamedTuple):
    """``lark``: what it may be; ``rules`` and ``uses`` define it. ``end``: the text behind it."""

    lark: str
    end: str
    rules: str = ""
    uses: tuple[grammar.Grammar, ...] = ()


def _in_tag(argument: Argument, form: CallForm, name: str) -> _Value:
    """Texts stand as they are, all else as JSON.

    Raises: GrammarError
    """
    schema, end = argument.schema, form.end_argument
    types = types_of(schema)
    if types and "string" not in types:
        own = grammar.json_schema_grammar(schema, whitespace="")
        return _Value(f"@{own.name}", end, uses=(own,))
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in choices]
        return _Value("(" + " | ".join(map(grammar.quoted, texts)) + ")", end)
    if any(key in schema for key in ("pattern", "minLength", "maxLength")):
        rule = f"{name.upper()}: {_one_line(argument)}\n"
        return _Value(name.upper(), end, rule)
    return _free_text(form, name)


def _free_text(form: CallForm, name: str) -> _Value:
    """Up to the tag, whatever stands before it, but without what ends the call: a reader would
    look for that first."""
    end = form.end_argument
    close = end.strip()
    stop = form.end.strip().partition("\n")[0]
    text = f"/(?s:.*){grammar.text_pattern(close)}/ & ~/(?s:.*){grammar.text_pattern(stop)}(?s:.*)/"
    return _Value(name, end[end.index(close) + len(close) :], f"{name}[lazy]: {text}\n")


def _one_line(argument: Argument) -> str:
    """Lark: a text with a pattern or lengths, which has to be one line without tags.

    Raises: GrammarError
    """
    schema = argument.schema
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    lark = f"/[^<\\n]{{{least},{most}}}/"
    pattern = schema.get("pattern")
    if pattern is None:
        return lark
    if not isinstance(pattern, str):
        raise GrammarError("must be a string", f"properties.{argument.name}.pattern")
    before = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    core = pattern.removeprefix("^")
    core = core[:-1] if ends else core
    return f"{lark} & {grammar.regex_literal(f'{before}({core})' + ('' if ends else '(?s:.*)'))}"
