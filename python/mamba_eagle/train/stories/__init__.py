"""Word problems put together from parts, so that a model must read rather than recognise.

A story takes people and a thing, lets one to five events happen, each from a list of kinds with
many wordings, and asks. The worked answers keep to few turns of phrase: what an answer says follows
from what happened, not from chance.
"""

from __future__ import annotations

import random

from mamba_eagle.train.problems import Problem
from mamba_eagle.train.stories.writing import FAMILIES, MAX_STEPS, Story

# Importing a module registers its families; their order is part of what a seed means.
# isort: off
from mamba_eagle.train.stories import things  # noqa: F401
from mamba_eagle.train.stories import money  # noqa: F401
from mamba_eagle.train.stories import rates  # noqa: F401
from mamba_eagle.train.stories import measures  # noqa: F401
from mamba_eagle.train.stories import more  # noqa: F401

# isort: on

__all__ = ["FAMILIES", "MAX_STEPS", "Story", "make"]

OPENINGS = (  # said before a story, without a number
    "It was a sunny day.",
    "It is a rainy day.",
    "{P} is very busy today.",
    "{P} has a big family.",
    "It is {P}'s birthday.",
    "{P} is having a party.",
    "{P} likes to count.",
    "{P} loves to help at home.",
    "{P} went to the market.",
    "School has just started.",
    "{P} is at home today.",
    "{P} is on vacation.",
    "Here is a question.",
    "Please solve this problem.",
    "{P} has a question for you.",
)

_NAMES = list(FAMILIES)
_WEIGHTS: list[float] = []
for _weight, _ in FAMILIES.values():
    _WEIGHTS.append(_weight + (_WEIGHTS[-1] if _WEIGHTS else 0.0))


def make(rng: random.Random) -> Problem:
    """One problem. Raises: ValueError if the numbers did not work out; draw again."""
    d = Story(rng)
    name = rng.choices(_NAMES, cum_weights=_WEIGHTS)[0]
    FAMILIES[name][1](d)
    if not 1 <= len(d.lines) <= MAX_STEPS:
        raise ValueError(f"{len(d.lines)} steps in {name}")
    if d.names and d.chance(0.05):
        opening = d.of(OPENINGS).format(P=min(d.names))
        d.question = f"{opening} {d.question}"
    return d.finish(":".join(["story", name, *d.shape]))
