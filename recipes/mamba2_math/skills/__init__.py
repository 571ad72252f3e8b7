"""What the embedded model learns beside word problems: to fill in JSON, to call a calculator, to
answer further questions about a problem. Everything is made by rule, of words in this folder."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

from mamba2_math import problems
from mamba2_math.draft import Draft, Problem
from mamba2_math.skills import calculator, facts, follow_ups
from mamba2_math.skills.chat import Chat, system

Maker = Callable[[Draft, Iterator[Problem]], Chat]
SKILLS: dict[str, Maker] = {
    "schema": lambda d, source: facts.make(d, next(source)),
    "calculator": calculator.make,
    "follow-up": lambda d, source: follow_ups.make(d, next(source)),
}
SHARES = (0.38, 0.33, 0.29)  # of the chats
SYSTEM_SHARE = 0.2  # of the chats begin with a turn of the system, which changes nothing
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "You are a math teacher.",
    "You help children with their homework.",
    "You are a careful and friendly assistant who answers questions.",
    "Answer the question.",
    "Think step by step.",
    "Solve the problem and show your work.",
    "Use the tools that you have.",
    "You work for a shop and answer its customers.",
    "Be polite. Today is Monday.",
    "Answer with JSON if you are asked for it.",
)
HELD_OUT_SEED = 20_261_126
HELD_OUT_COUNT = 200


def _make(skill: str, rng: random.Random, source: Iterator[Problem]) -> Chat:
    chat = SKILLS[skill](Draft(rng), source)
    if rng.random() < SYSTEM_SHARE:
        chat = chat._replace(messages=[system(rng.choice(SYSTEMS)), *chat.messages])
    return chat


@functools.cache
def held_out(skill: str) -> tuple[Chat, ...]:
    """Chats that no training run may see, about problems that are held out, too."""
    rng = random.Random(f"{skill}/{HELD_OUT_SEED}")
    source = itertools.cycle(problems.held_out())
    chats: dict[str, Chat] = {}
    while len(chats) < HELD_OUT_COUNT:
        chat = _make(skill, rng, source)
        chats.setdefault(chat.key, chat)
    return tuple(chats.values())


def stream(seed: int) -> Iterator[Chat]:
    """An endless stream of chats, none of which is held out, each up to a turn of the assistant."""
    kept = {turn.key for skill in SKILLS for chat in held_out(skill) for turn in chat.turns()}
    rng, source = random.Random(f"chats/{seed}"), problems.stream(seed)
    names = list(SKILLS)
    while True:
        (skill,) = rng.choices(names, SHARES)
        try:
            chat = rng.choice(_make(skill, rng, source).turns())
        except (ArithmeticError, ValueError):
            continue  # numbers that do not work out: draw again
        if chat.key not in kept:
            yield chat
