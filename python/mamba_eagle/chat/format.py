"""How one model's chats are written and read: its template, its family, its special tokens."""

import logging
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from mamba_eagle.chat import family as families
from mamba_eagle.chat.parse import FamilyParser, template_problem
from mamba_eagle.chat.render import ChatTemplate, template_source
from mamba_eagle.chat.thinking import Budget, token_set
from mamba_eagle.config import ServerConfig, flag_of
from mamba_eagle.core import shown

log = logging.getLogger("mamba_eagle.chat")
EDGES = ("open", "open_pattern", "close", "close_pattern")


class ChatFormat:
    """``hf``: a tokenizer of transformers; ``special_tokens``: texts and ids of its special ones.

    template: a template's text, "" for the tokenizer's own. call_parser, reasoning_parser: names
    of ``family.read_family``, ``auto`` or ``none``.

    Raises: FamilyError
    """

    def __init__(
        self,
        hf: Any,
        special_tokens: Mapping[str, int],
        template: str = "",
        call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self.hf = hf
        self.template = ChatTemplate(hf, template)
        # Lark: all tokens but these
        self._all_but = cache(lambda *some: token_set({*hf.get_vocab().values()} - {*some}))
        self.special_tokens = special_tokens
        own = getattr(hf, "response_template", None)
        chat_template = self.template.source(with_tools=True)
        self.family = families.family_of(own, chat_template, call_parser, reasoning_parser)
        if self.family is not None and (wrong := template_problem(self.family)):
            if {call_parser, reasoning_parser} & {"auto"} and own is not None:
                # A mistake in the checkpoint does not keep it from being served.
                log.warning("response_template of the checkpoint: %s; it is not used", wrong)
                self.family = None
            else:
                raise families.FamilyError(f"its response_template: {wrong}")

    def prefix(self, prompt: str) -> str:
        """The part of the assistant's message that the prompt already has."""
        if self.family is None:
            return ""
        return after_last_anchor(self.family.template, prompt)

    def reader(self, with_calls: bool, with_reasoning: bool) -> families.Family | None:
        """The part of the family that a request wants separated; None: it wants none."""
        family = self.family
        if family is None:
            return None
        if not with_calls:
            family = family.without_calls()
        if not with_reasoning:
            family = family.with_reasoning_of(None)
        return family if family.reads_calls or family.reads_reasoning else None

    def budget(self, tokens: int, stops: Collection[int]) -> Budget | None:
        """At most this many tokens of reasoning; None if there is none to count, or its end is not
        one token, which would be needed to keep count. stops: the tokens that end a text."""
        if self.family is None or self.family.reasoning is None:
            return None
        end = self.hf.encode(self.family.reasoning.close, add_special_tokens=False)
        if len(end) != 1:
            return None
        others = self._all_but(end[0], *sorted(stops))
        return Budget(tokens, end[0], end[0] in self.special_tokens.values(), others)

    def kept_tokens(self, family: families.Family | None) -> frozenset[int]:
        """Special tokens that its parts begin and end with: they must be in the text."""
        if family is None:
            return frozenset()
        edges = " ".join(
            str(part[edge])
            for name, part in family.fields.items()
            if name != families.CONTENT
            for edge in EDGES
            if edge in part
        ).replace("\\", "")
        return frozenset(number for text, number in self.special_tokens.items() if text in edges)


def after_last_anchor(template: Mapping[str, Any], prompt: str) -> str:
    """What follows the last beginning of an assistant's message; "" if there is none."""
    anchor = template.get("start_anchor")
    if anchor is None:
        pattern = re.compile(template.get("start_anchor_pattern", "(?!)"), re.DOTALL)
        ends = [match.end() for match in pattern.finditer(prompt)]
    else:
        anchors = [anchor] if isinstance(anchor, str) else anchor
        ends = [prompt.rfind(one) + len(one) for one in anchors if one in prompt]
    return prompt[max(ends) :] if ends else ""


def reasoning_is(family: families.Family | None, prefix: str) -> str:
    """``open``: the prompt ends inside reasoning. ``possible``: the model may begin with it.
    ``over``: neither."""
    if family is None or not family.reads_reasoning:
        return "over"
    parser = FamilyParser(family, prefix)
    parser.feed("\0")  # until something follows, a tag at the end might still go on
    if parser.field == families.REASONING:
        return "open"
    return "over" if prefix.strip() else "possible"


def chat_problems(config: ServerConfig) -> list[str]:
    """Why ``--chat-template`` and the parsers cannot be used, with what to change."""
    problems = []
    if config.chat_template:
        try:
            template_source(config.chat_template)
        except ValueError as error:
            problems.append(f"--chat-template {shown(config.chat_template)[1:-1]}: {error}")
    for name in ("tool_call_parser", "reasoning_parser"):
        value = getattr(config, name)
        if value in ("auto", families.NONE):
            continue
        try:
            wrong = template_problem(families.read_family(value))
        except families.FamilyError as error:
            wrong = str(error)
        if wrong:
            problems.append(f"{flag_of(name)} {shown(value)[1:-1]}: {wrong}")
    return problems
