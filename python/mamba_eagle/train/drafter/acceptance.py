"""How many tokens of its drafts a chain would get accepted, by full passes over answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.drafter.batches import Answer, Rows, passes, to_rows
from mamba_eagle.train.drafter.recipe import Recipe
from mamba_eagle.train.drafter.target import ask_target
from mamba_eagle.train.drafter.world import World


class Acceptance(NamedTuple):
    """Of chains of best guesses. A guess is right if it is the token that the answer has there,
    which is what a server's target would sample again."""

    by_depth: list[float]  # share of drafts whose first 1, 2, … tokens are all right
    length: float  # tokens that a request gains in a verify step, the target's own included

    def __str__(self) -> str:
        depths = " ".join(f"{share:.3f}" for share in self.by_depth)
        return f"accepted up to depth 1, 2, …: {depths}; {self.length:.2f} tokens a step"

    def as_dict(self) -> dict[str, Any]:
        return {"by_depth": [round(share, 4) for share in self.by_depth], "length": self.length}


@torch.no_grad()
def measure_acceptance(
    recipe: Recipe, target: CausalLM, answers: Sequence[Answer], depth: int, most: int, world: World
) -> Acceptance:
    """Each process takes its part of ``answers``, in passes of ``most`` tokens."""
    right, possible = torch.zeros(2, depth, dtype=torch.float64, device=world.device)
    walked = torch.zeros(2, dtype=torch.float64, device=world.device)  # tokens and steps
    for group in passes(answers[world.rank :: world.size], most):
        rows = to_rows(group, depth, world.device)
        alive = _prefixes(recipe, target, rows, depth)
        right += alive.sum((0, 1))
        possible += torch.tensor(
            [sum(answer.guesses(d) for answer in group) for d in range(depth)], device=world.device
        )
        for answer, accepted in zip(group, alive.sum(-1).tolist()):
            walk = _walk(accepted, answer.prompt_len, len(answer.tokens) - 1)
            walked += torch.tensor(walk, device=world.device)
    for sums in (right, possible, walked):
        world.add_up(sums)
    shares = (right / possible.clamp(min=1)).tolist()
    return Acceptance(shares, float(walked[0] / walked[1].clamp(min=1)))


def _prefixes(recipe: Recipe, target: CausalLM, rows: Rows, depth: int) -> Tensor:
    """[b, l, depth] bool: whether the first 1, 2, … tokens drafted behind a root are right."""
    taught = ask_target(target, rows)
    following = rows.tokens.roll(-1, dims=1).flatten()
    alive, found = torch.ones_like(rows.tokens, dtype=torch.bool), []
    for j, outputs in enumerate(recipe.unroll(rows.tokens, taught.features, depth)):
        here = rows.drafts[j].flat
        best = recipe.token_ids(recipe.logits(j, outputs.flatten(0, 1)[here]).argmax(-1))
        matches = torch.zeros_like(following, dtype=torch.bool)
        matches[here] = best == following[here]
        # the draft that began at p is at p + j now
        alive = alive & matches.view(rows.tokens.shape).roll(-j, dims=1)
        found.append(alive)
    return torch.stack(found, dim=-1)


def _walk(accepted: list[int], begin: int, end: int) -> tuple[int, int]:
    """Tokens and verify steps of the answer, when each step gains what its root's draft got right
    and one token more. accepted: by position of the root."""
    root, steps = begin, 0
    while root < end:
        root = min(root + accepted[root] + 1, end)
        steps += 1
    return end - begin, steps
