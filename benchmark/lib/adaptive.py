"""Engines that choose their trees beside engines with fixed ones: flags, and what is reported."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import save_file

from benchmark.lib.answering import Answering
from benchmark.lib.rounds import Contestant, Round
from mamba_eagle.bench.results import Line
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.registry import read_model_config

# All contestants stand in the same memory, and none may know a prompt from an earlier round.
SHARED = [
    *("--disable-radix-cache", "--mem-fraction-static", "0.9"),
    *("--max-total-tokens", "40000", "--max-mamba-cache-size", "64"),
]
PLAIN, ADAPTIVE, USELESS = "plain", "adaptive", "useless"
HEADER = (
    "batch contestant   tokens/s accept  of plain: least to most   fastest   "
    "of the best fixed: …  fastest"
)

Adaptive = Contestant[Answering, Round]


# ── who answers ──────────────────────────────────────────────────────────────────────────────


def tree_flags(shape: str) -> list[str]:
    """``shape`` is top-k x steps x nodes, as in 4x5x16."""
    flags = ("eagle-topk", "num-steps", "num-draft-tokens")
    return [
        word
        for flag, value in zip(flags, shape.split("x"), strict=True)
        for word in (f"--speculative-{flag}", value)
    ]


def embedded_flags(shapes: Sequence[str], useless_head: Path) -> dict[str, list[str]]:
    """name -> flags, of the embedded model: without drafts, with each fixed shape, and adaptive
    ones with the embedded head and a useless one. The adaptive ones draft the first shape at most.
    """
    eagle = ["--model-path", str(EMBEDDED_MODEL), "--speculative-algorithm", "EAGLE"]
    largest = tree_flags(shapes[0])
    flags = {PLAIN: ["--model-path", str(EMBEDDED_MODEL), "--speculative-algorithm", "NONE"]}
    for shape in shapes:
        flags[shape] = [*eagle, *tree_flags(shape), "--no-speculative-adaptive"]
    flags[ADAPTIVE] = [*eagle, *largest]
    flags[USELESS] = [*eagle, *largest, "--speculative-draft-model-path", str(useless_head)]
    return flags


def geometry_flags(target: Path, drafter: Path, shape: str) -> dict[str, list[str]]:
    """name -> flags, of a target and a drafter with random weights, so that drafts are never right;
    with and without drafts. ``target`` and ``drafter`` are folders with a config.json."""
    model = dummy_model_flags(target)
    standalone = ["--speculative-algorithm", "STANDALONE", *tree_flags(shape)]
    standalone += ["--speculative-draft-model-path", str(drafter)]
    return {PLAIN: [*model, "--speculative-algorithm", "NONE"], USELESS: [*model, *standalone]}


def dummy_model_flags(folder: Path) -> list[str]:
    """A model of which there is only a config.json: random weights, no tokenizer."""
    return ["--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]


def write_useless_head(folder: Path) -> None:
    """The embedded head's shape with random weights: what it drafts is never right."""
    head = EagleHead(read_model_config(EMBEDDED_HEADS["EAGLE"]))
    random_weights(head, 1)
    shutil.copy(EMBEDDED_HEADS["EAGLE"] / "config.json", folder)
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    save_file(weights, folder / "model.safetensors")


# ── what they made ───────────────────────────────────────────────────────────────────────────


class Comparison:
    """One contestant's rounds beside the plain one's and the best fixed one's."""

    def __init__(self, each: Adaptive, plain: Adaptive, fixed: Sequence[Adaptive]) -> None:
        """fixed: those that always draft the same, ``plain`` among them."""
        self.each = each
        self.best = max(fixed, key=lambda other: other.median_speed)
        self.ratios, self.of_best = each.ratios(plain), each.ratios(self.best)
        self.fastest = each.fastest / plain.fastest
        self.fastest_of_best = each.fastest / max(other.fastest for other in fixed)
        self.accept_length = each.rounds[-1].accept_length

    def row(self, batch: int) -> str:
        """Below HEADER."""
        return (
            f"{batch:>5} {self.each.name:>10} {self.each.median_speed:>10.0f} "
            f"{self.accept_length:>6.2f} "
            f"{median(self.ratios):>8.3f} {min(self.ratios):>6.3f} to {max(self.ratios):.3f} "
            f"{self.fastest:>8.3f} "
            f"{median(self.of_best):>8.3f} {min(self.of_best):>6.3f} to {max(self.of_best):.3f} "
            f"{self.fastest_of_best:>8.3f}"
        )

    def line(self, batch: int, about: dict[str, Any]) -> Line:
        """For benchmark/results. about: what all lines of a run have in common."""
        name = self.each.name
        return {
            "name": "adaptive_ratio",
            "batch": batch,
            "head": {PLAIN: "none", USELESS: "random"}.get(name, "embedded"),
            "choice": ADAPTIVE if name in (ADAPTIVE, USELESS) else name,
            "value": round(median(self.ratios), 4),
            "least": round(min(self.ratios), 4),
            "most": round(max(self.ratios), 4),
            "fastest": round(self.fastest, 4),
            "fastest_of_best_fixed": round(self.fastest_of_best, 4),
            "rounds": len(self.each.rounds),
            "best_fixed": self.best.name,
            "of_best_fixed": round(median(self.of_best), 4),
            "tokens_per_s": round(self.each.median_speed, 1),
            "accept_length": round(self.accept_length, 3),
            **about,
        }


def compare(contestants: Sequence[Adaptive], shapes: Sequence[str]) -> list[Comparison]:
    """shapes: names of those with a fixed tree."""
    by_name = {each.name: each for each in contestants}
    plain = by_name[PLAIN]
    fixed = [by_name[name] for name in (PLAIN, *shapes)]
    return [Comparison(each, plain, fixed) for each in contestants]


def shapes_used(contestant: Adaptive) -> str:
    """In how many steps each shape was drafted, so far."""
    state = contestant.player.speculation()
    steps = ", ".join(f"{name} {use.steps}" for name, use in state.shapes.items())
    return f"{contestant.name}: {steps}" + (", given up" if state.disabled else "")
