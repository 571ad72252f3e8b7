"""Where two greedy texts in bfloat16 part, and whether rounding explains it.

Texts with and without speculation come out of different kernels, which round differently. So they
may part where the two best tokens are nearly tied, and nowhere else. What rounding does to the gap
between two tokens is measured, at every token up to the first difference, against float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmark.lib.problems import prompt_ids
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.eval import gsm8k

Logits = Callable[[list[int]], Tensor]  # tokens [n] -> float32 [n, V], row i about token i + 1

# Of all tokens, the share whose rounding error the bound leaves out: the largest of ten thousands
# would make it a bound that nothing exceeds.
RARE = 1e-3


class Answer(NamedTuple):
    tokens: list[int]
    top: list[list[tuple[float, int]]]  # of each token: (logprob, token) of the two best, or more


class Parting(NamedTuple):
    """The first difference of two texts. Gaps: logit of the plain text's token less the other's."""

    prompt: int
    position: int  # in the output
    tokens: tuple[int, int]  # of the plain text, of the other
    gap: float  # in float32
    plain_gap: float  # as the plain text's run saw it; nan if the other was not among its best


class Comparison(NamedTuple):
    texts: int
    partings: list[Parting]
    # of the gap between the two best tokens: error against float32 [n], up to the first difference
    plain_errors: Tensor
    other_errors: Tensor
    spacing: float  # of bfloat16 numbers at the size of the best logits

    @property
    def bound(self) -> float:
        """The largest gap that two rounding errors can close."""
        return 2 * float(self.plain_errors.quantile(1 - RARE))

    def report(self, name: str) -> str:
        plain, other = self.plain_errors, self.other_errors
        share = len(self.partings) / self.texts
        lines = [
            f"{name}: {len(self.partings)} of {self.texts} texts part ({share:.1%})",
            f"  error of the gap between the two best logits, {len(plain)} tokens: median "
            f"{plain.median():.4f} plain, {other.median():.4f} {name}; "
            f"of one in {round(1 / RARE)} {plain.quantile(1 - RARE):.3f}, "
            f"{other.quantile(1 - RARE):.3f}; a near-tie is a gap up to {self.bound:.3f}; "
            f"logits are {self.spacing} apart in bfloat16",
        ]
        lines += [
            f"  text {p.prompt}, token {p.position}: {p.tokens[0]} or {p.tokens[1]}, "
            f"gap {p.gap:+.4f} in float32, {p.plain_gap:+.4f} in the plain run"
            for p in sorted(self.partings, key=lambda p: -abs(p.gap))
        ]
        return "\n".join(lines)


def problem_prompts(count: int) -> list[list[int]]:
    """The embedded problems, and as many that break off in the middle: how an answer goes on the
    embedded model is sure of, how a question does it cannot know."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    task = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, count)
    prompts = prompt_ids(task.questions, tokenizer)
    return prompts + [prompt[: len(prompt) // 2] for prompt in prompts]


def compare(
    logits: Logits,
    prompts: Sequence[list[int]],
    plain: Sequence[Answer],
    other: Sequence[Answer],
) -> Comparison:
    """Answers to the same prompts, by bfloat16 runs of the model that ``logits`` is in float32."""
    partings = []
    plain_errors, other_errors, best_logits = [], [], []
    for number, (prompt, one, two) in enumerate(zip(prompts, plain, other, strict=True)):
        first = len(prompt)
        exact = logits([*prompt, *one.tokens][:-1])[first - 1 :]
        same = common_length(one.tokens, two.tokens)
        if same < min(len(one.tokens), len(two.tokens)):
            a, b = tokens = (one.tokens[same], two.tokens[same])
            gap = float(exact[same, a] - exact[same, b])
            best = {token: logprob for logprob, token in one.top[same]}
            nan = float("nan")
            plain_gap = best.get(a, nan) - best.get(b, nan)
            partings.append(Parting(number, same, tokens, gap, plain_gap))
        # the token at which texts part follows the same ones
        compared = min(same + 1, len(one.tokens), len(two.tokens))
        plain_errors.append(gap_errors(exact, one, compared))
        other_errors.append(gap_errors(exact, two, compared))
        best_logits.append(exact.max(-1).values)
    spacing = bfloat16_spacing(float(torch.cat(best_logits).median()))
    errors = torch.cat(plain_errors), torch.cat(other_errors)
    return Comparison(len(prompts), partings, *errors, spacing)


def bfloat16_spacing(value: float) -> float:
    """From a number of this size to the next in bfloat16, which has 8 significant bits."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7)


def common_length(one: list[int], two: list[int]) -> int:
    pairs = enumerate(zip(one, two))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))


def gap_errors(exact: Tensor, answer: Answer, count: int) -> Tensor:
    """How wrong the gap between the two best logits is at the first ``count`` tokens. [count]"""
    found = torch.tensor([[best[0][0], best[1][0]] for best in answer.top[:count]])
    tokens = torch.tensor([[best[0][1], best[1][1]] for best in answer.top[:count]])
    expected = exact[:count].gather(1, tokens)
    return (found.diff(dim=1) - expected.diff(dim=1))[:, 0].abs()


def assert_only_near_ties(comparison: Comparison) -> None:
    """The plain run is as exact as logits in bfloat16 can be, the other rounds no worse, and texts
    part only at near-ties."""
    assert float(comparison.plain_errors.median()) <= comparison.spacing
    for quantile in (0.5, 0.99):
        plain = float(comparison.plain_errors.quantile(quantile))
        other = float(comparison.other_errors.quantile(quantile))
        assert other <= 1.5 * plain, f"errors at {quantile}: {other} beside {plain}"
    wide = [p for p in comparison.partings if abs(p.gap) > comparison.bound]
    assert not wide, f"gaps above {comparison.bound}: {wide}"
