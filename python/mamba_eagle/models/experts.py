"""Experts are published one by one; ours are stacked."""

import re

from mamba_eagle.models.base import Target

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def gated_expert_place(name: str) -> Target | None:
    """Where a tensor goes, if it is an expert's; gate and up projection are one matrix."""
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    stem, index, half = found[1], int(found[2]), HALVES.get(found[3])
    if half is None:
        return Target(f"{stem}.down_proj", index)
    return Target(f"{stem}.up_proj", index, half=half)
