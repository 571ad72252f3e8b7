"""Who can make a problem: whole scenarios, and families of stories put together from parts.

The modules that hold them register themselves here when they are imported, and this module imports
none of them. The order in both tables is part of what a seed means: ``scenarios.py`` registers from
top to bottom, and ``stories/__init__.py`` imports its modules in a fixed order, whichever of them
is asked for first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Maker = Callable[[Any], None]  # writes one problem with the Draft or Story that it is given


class Family(NamedTuple):
    weight: float  # how often it is drawn, relative to the others
    make: Maker


SCENARIOS: dict[str, Maker] = {}
FAMILIES: dict[str, Family] = {}


def scenario(function: Maker) -> Maker:
    SCENARIOS[function.__name__] = function
    return function


def story(weight: float) -> Callable[[Maker], Maker]:
    def register(function: Maker) -> Maker:
        FAMILIES[function.__name__] = Family(weight, function)
        return function

    return register
