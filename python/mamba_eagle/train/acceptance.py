"""Acceptance of a head's drafts, measured by full passes over held-out answers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.batches import Answer, PaddedAnswers, group_into_passes, pad_answers
from mamba_eagle.train.heads.base import TrainableHead
from mamba_eagle.train.target import run_target
from mamba_eagle.train.world import World


class Acceptance(NamedTuple):
    """Acceptance of chains that draft the most likely token at each depth.

    A draft token counts as accepted if it equals the answer's token at its position, which is what
    a server's target would sample again.
    """

    by_depth: list[float]  # share of drafts whose first 1, 2, … tokens are all accepted
    length: float  # tokens per verify step, including the target's own

    def __str__(self) -> str:
        depths = " ".join(f"{share:.3f}" for share in self.by_depth)
        return f"accepted up to depth 1, 2, …: {depths}; {self.length:.2f} tokens per step"

    def as_dict(self) -> dict[str, Any]:
        return {"by_depth": [round(share, 4) for share in self.by_depth], "length": self.length}


@torch.no_grad()
def measure_acceptance(
    head: TrainableHead,
    target: CausalLM,
    answers: Sequence[Answer],
    depth: int,
    max_tokens: int,
    world: World,
) -> Acceptance:
    """Each process measures its share of ``answers``, in passes of at most ``max_tokens``."""
    accepted, drafted = torch.zeros(2, depth, dtype=torch.float64, device=world.device)
    walked = torch.zeros(2, dtype=torch.float64, device=world.device)  # tokens and verify steps
    for group in group_into_passes(answers[world.rank :: world.size], max_tokens):
        padded = pad_answers(group, depth, world.device)
        prefixes = _accepted_prefixes(head, target, padded, depth)
        accepted += prefixes.sum((0, 1))
        drafted += torch.tensor(
            [sum(answer.num_drafts(d) for answer in group) for d in range(depth)],
            device=world.device,
        )
        for answer, lengths in zip(group, prefixes.sum(-1).tolist()):
            walk = _walk(lengths, answer.prompt_len, len(answer.tokens) - 1)
            walked += torch.tensor(walk, device=world.device)
    for sums in (accepted, drafted, walked):
        world.sum(sums)
    shares = (accepted / drafted.clamp(min=1)).tolist()
    return Acceptance(shares, float(walked[0] / walked[1].clamp(min=1)))


def _accepted_prefixes(
    head: TrainableHead, target: CausalLM, answers: PaddedAnswers, depth: int
) -> Tensor:
    """[b, l, depth] bool, by root: whether the first 1, 2, … tokens of its draft are accepted."""
    outputs_of_target = run_target(target, answers)
    following = answers.tokens.roll(-1, dims=1).flatten()
    accepted, by_depth = torch.ones_like(answers.tokens, dtype=torch.bool), []
    for j, best in enumerate(head.greedy_drafts(answers, outputs_of_target, depth)):
        positions = answers.drafts[j].flat
        matches = torch.zeros_like(following, dtype=torch.bool)
        matches[positions] = best == following[positions]
        # at depth j, the draft with its root at p has reached position p + j
        accepted = accepted & matches.view(answers.tokens.shape).roll(-j, dims=1)
        by_depth.append(accepted)
    return torch.stack(by_depth, dim=-1)


def _walk(accepted: list[int], begin: int, end: int) -> tuple[int, int]:
    """Tokens and verify steps of one answer. Each step advances by the accepted tokens of its
    root's draft and one more.

    Args:
        accepted: accepted draft tokens, by position of the root.
    """
    root, steps = begin, 0
    while root < end:
        root = min(root + accepted[root] + 1, end)
        steps += 1
    return end - begin, steps
