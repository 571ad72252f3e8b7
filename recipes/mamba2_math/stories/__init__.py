"""Word problems put together from parts, so that a model must read rather than recognise.

A story takes people and a thing, lets one to five events happen, each from a list of kinds with
many wordings, and asks. The worked answers keep to few turns of phrase: what an answer says follows
from what happened, not from chance.
"""

from __future__ import annotations

import itertools
import random

from mamba2_math.draft import Problem
from mamba2_math.registry import FAMILIES
from mamba2_math.stories.writing import MAX_STEPS, Story

# Importing a module registers its families; their order is part of what a seed means. It holds
# whichever of them is imported first, because Python runs this file before any of them.
# isort: off
from mamba2_math.stories import things  # noqa: F401
from mamba2_math.stories import money  # noqa: F401
from mamba2_math.stories import rates  # noqa: F401
from mamba2_math.stories import measures  # noqa: F401
from mamba2_math.stories import more  # noqa: F401

# isort: on

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
_CUMULATIVE_WEIGHTS = list(itertools.accumulate(family.weight for family in FAMILIES.values()))


def make(rng: random.Random) -> Problem:
    """One problem. Raises: ValueError if the numbers did not work out; draw again."""
    d = Story(rng)
    name = rng.choices(_NAMES, cum_weights=_CUMULATIVE_WEIGHTS)[0]
    FAMILIES[name].make(d)
    if not 1 <= len(d.lines) <= MAX_STEPS:
        raise ValueError(f"{len(d.lines)} steps in {name}")
    if d.names and d.chance(0.05):
        opening = d.of(OPENINGS).format(P=min(d.names))
        d.question = f"{opening} {d.question}"
    return d.finish(":".join(["story", name, *d.shape]))
