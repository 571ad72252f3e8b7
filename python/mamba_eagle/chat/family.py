"""How a model family writes what it says: files in ``families/``, or a checkpoint's own template.

A file has, beside the ``response_template`` that transformers' parser reads:

- ``models``: whose form this is, for people,
- ``markers``: texts that all stand in the family's chat templates; none: chosen by name only,
- ``reasoning``: what stands before and after reasoning,
- ``calls``: how tool calls are written, which forced calls are made of (see ``call_grammar``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mamba_eagle.core import shown

FOLDER = Path(__file__).parent / "families"
# The more special form first: markers of one may all stand in another's templates.
FAMILIES = tuple(
    "nemotron_nano_v2 nemotron_3 granite_4 qwen3_coder qwen3 falcon_h1 hermes mamba2_math".split()
)
NONE = "none"
REASONING, CALLS, CONTENT = "reasoning_content", "tool_calls", "content"
# Other names of the field in checkpoints' own templates.
REASONING_NAMES = ("thinking", "reasoning")


class FamilyError(ValueError):
    """A response template that cannot be used."""


@dataclass(frozen=True)
class CallForm:
    """How calls are written. ``{name}`` in ``begin`` stands for the tool's, and ``{key}`` in
    ``begin_argument`` for the argument's."""

    arguments: str  # json: one object; tags: one tag per argument
    begin: str
    end: str
    between: str = "\n"
    begin_all: str = ""
    end_all: str = ""
    begin_argument: str = ""
    end_argument: str = ""


@dataclass(frozen=True)
class Tags:
    open: str
    close: str


@dataclass(frozen=True)
class Family:
    name: str
    template: Mapping[str, Any]  # of transformers
    reasoning: Tags | None = None
    calls: CallForm | None = None  # None: calls are understood, but cannot be forced
    markers: tuple[str, ...] = field(default=())

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.template["fields"]

    @property
    def reads_calls(self) -> bool:
        return CALLS in self.fields

    @property
    def reads_reasoning(self) -> bool:
        return REASONING in self.fields

    def with_reasoning_of(self, other: Family | None) -> Family:
        """These calls, the other's reasoning; None: reasoning is not separated."""
        fields = {name: value for name, value in self.fields.items() if name != REASONING}
        if other is not None and other.reads_reasoning:
            fields = {REASONING: other.fields[REASONING], **fields}
        reasoning = other.reasoning if other is not None else None
        return replace(self, template={**self.template, "fields": fields}, reasoning=reasoning)

    def without_calls(self) -> Family:
        fields = {name: value for name, value in self.fields.items() if name != CALLS}
        return replace(self, template={**self.template, "fields": fields}, calls=None)


@lru_cache(maxsize=64)
def read_family(name: str) -> Family:
    """One of ``FAMILIES``, or the path of a file like theirs.

    Raises: FamilyError
    """
    path = FOLDER / f"{name}.json" if name in FAMILIES else Path(name)
    try:
        if name not in FAMILIES and not (path.suffix == ".json" and path.is_file()):
            known = ", ".join((*FAMILIES, NONE))
            raise FamilyError(f"it must be one of {known}, or the path of a JSON file like theirs")
        values = json.loads(path.read_text(encoding="utf-8"))
        return _family(name, values)
    except FamilyError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FamilyError(f"the file cannot be used: {shown(str(error))}") from None


def _family(name: str, values: Mapping[str, Any]) -> Family:
    if not isinstance(values, dict) or "response_template" not in values:
        raise FamilyError("the file must hold an object with a response_template")
    reasoning, calls = values.get("reasoning"), values.get("calls")
    template = checked_template(values["response_template"])
    tags = Tags(**reasoning) if reasoning is not None else None
    form = CallForm(**calls) if calls is not None else None
    return Family(name, template, tags, form, tuple(values.get("markers", ())))


def checked_template(template: Any) -> Mapping[str, Any]:
    """The template with the names of fields that are used here.

    Raises: FamilyError
    """
    fields = template.get("fields") if isinstance(template, dict) else None
    if not isinstance(fields, dict) or not fields:
        raise FamilyError("response_template must be an object with fields")
    renamed = {
        REASONING if name in REASONING_NAMES else name: value for name, value in fields.items()
    }
    return {**template, "fields": renamed}


def family_of(
    own_template: Any, chat_template: str, call_parser: str = "auto", reasoning_parser: str = "auto"
) -> Family | None:
    """The form to expect; None if nothing is separated.

    own_template: the tokenizer's ``response_template``, if it has one.
    call_parser, reasoning_parser: a name of ``read_family``, ``auto`` or ``none``.
    Raises: FamilyError
    """
    found = _detected(own_template, chat_template)
    calls = found if call_parser == "auto" else None
    if call_parser not in ("auto", NONE):
        calls = read_family(call_parser)
    reasoning = found if reasoning_parser == "auto" else None
    if reasoning_parser not in ("auto", NONE):
        reasoning = read_family(reasoning_parser)
    elif reasoning_parser == "auto" and call_parser not in ("auto", NONE):
        reasoning = calls  # a file says both
    if calls is None:
        base = reasoning or found
        return base.without_calls().with_reasoning_of(reasoning) if base is not None else None
    return calls if calls is reasoning else calls.with_reasoning_of(reasoning)


def _detected(own_template: Any, chat_template: str) -> Family | None:
    marked = next(
        (
            family
            for family in map(read_family, FAMILIES)
            if family.markers and all(marker in chat_template for marker in family.markers)
        ),
        None,
    )
    if own_template is None:
        return marked
    # How to write calls is not in transformers' templates.
    return Family(
        "the checkpoint's response_template",
        checked_template(own_template),
        marked.reasoning if marked is not None else None,
        marked.calls if marked is not None else None,
    )
