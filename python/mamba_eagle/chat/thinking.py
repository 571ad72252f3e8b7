"""Reasoning as part of a grammar: as long as the model likes, or up to a budget of tokens.

A budget is a count of tokens in the grammar itself, so where reasoning ends depends on the text
before it alone, and is the same with and without drafts.
"""

from collections.abc import Iterable
from typing import NamedTuple

from mamba_eagle.chat.family import Tags
from mamba_eagle.constrain import grammar


class Budget(NamedTuple):
    """At most ``tokens`` tokens of reasoning. ``end``: the token that ends it; ``others``: all
    that a text may have but this one and those that end the text, as Lark has token ids."""

    tokens: int
    end: int
    end_is_special: bool
    others: str


def token_set(tokens: Iterable[int]) -> str:
    """Lark: any one of these tokens."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    texts = (str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"<[{','.join(texts)}]>"


def thinking_first(
    body: grammar.Grammar | None,
    tags: Tags,
    state: str,
    special: grammar.Special = None,
    avoid: str = "",
    budget: Budget | None = None,
) -> grammar.Grammar | None:
    """Reasoning, then ``body``; None: then anything, and without a budget no grammar is needed.

    state: see ``format.reasoning_is``. avoid: what reasoning must not contain, since it would be
    read as its end.
    """
    if state == "over" or (body is None and budget is None):
        return body
    begin = grammar.literal(tags.open, special) if state == "possible" else ""
    if budget is not None:
        thought, rules = _counted(tags, budget)
    else:
        thought, rules = _free(tags, special, avoid)
    if body is None:
        assert budget is not None
        rest = f"({budget.others} | <[{budget.end}]>)*"
        return grammar.lark_grammar(f"start: {begin} {thought} {rest}\n{rules}")
    first = f"{begin} {thought} SPACES @{body.name}"
    # A model that opens its reasoning itself may do without, unless a budget was asked for.
    start = f"{first} | @{body.name}" if begin and budget is None else first
    return grammar.lark_grammar(f"start: {start}\n{rules}SPACES: {grammar.SPACES}\n", body)


def _free(tags: Tags, special: grammar.Special, avoid: str) -> tuple[str, str]:
    """Lark: a thought with its end, and the rules that it needs."""
    names = special or {}
    but = ""
    if avoid and avoid not in names:
        but = f" & ~/(?s:.*){grammar.text_pattern(avoid)}(?s:.*)/"
    if tags.close in names:
        return f"THOUGHT <[{names[tags.close]}]>", f"THOUGHT: /(?s:.*)/{but}\n"
    return "thought", f"thought[lazy]: /(?s:.*){grammar.text_pattern(tags.close)}/{but}\n"


def _counted(tags: Tags, budget: Budget) -> tuple[str, str]:
    """The same, of at most this many tokens.

    A token that is not special must never be the only one that its id allows: llguidance 1.9
    then takes the text of it for forced, and loses count when tokens are taken back. So at the
    limit the end may also be written as text.
    """
    n, others, end = budget.tokens, budget.others, f"<[{budget.end}]>"
    if n == 0:
        return end if budget.end_is_special else grammar.quoted(tags.close), ""
    if budget.end_is_special:
        return f"{others}{{0,{n}}} {end}", ""
    return f"({others}{{0,{n}}} {end} | {others}{{{n}}} {grammar.quoted(tags.close)})", ""
