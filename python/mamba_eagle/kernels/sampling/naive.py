"""The target's token at one node, in plain Python.

    x' = x penalised + bias, -inf where a token is not allowed
    token = argmax over the tokens that the filters keep of x' / temperature + noise

Of equal numbers the lower token id comes first, everywhere. The filters, in this order: top-k;
top-p of what top-k left; min-p relative to the best token. A token counts with the mass
``exp((x' - max) / temperature)``, in units of 2**-40 and rounded down, so that sums do not depend
on the order of addition.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

NO_TOKEN = -1
MASS = 2.0**40


@dataclass
class Rule:
    """What a request asks for, and what its text so far has in it."""

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt: Collection[int] = ()  # tokens
    counts: Mapping[int, int] = field(default_factory=dict)  # of output tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned: Collection[int] = ()  # stop tokens that may not come yet
    allowed: Collection[int] | None = None  # by a grammar; None: all


def adjusted(logits: Sequence[float], rule: Rule, path: Sequence[int]) -> list[float]:
    """Penalties, bias, stop tokens, grammar. path: the drafted tokens that lead to the node."""
    result = []
    for token, x in enumerate(logits):
        count = rule.counts.get(token, 0) + list(path).count(token)
        if count or token in rule.prompt:
            x = x / rule.repetition_penalty if x > 0 else x * rule.repetition_penalty
        x = x - rule.frequency_penalty * count - (rule.presence_penalty if count else 0.0)
        x = x + rule.logit_bias.get(token, 0.0)
        if token in rule.banned or (rule.allowed is not None and token not in rule.allowed):
            x = -math.inf
        result.append(x)
    return result


def kept(logits: Sequence[float], rule: Rule) -> list[int]:
    """Tokens that the filters leave, the best first."""
    highest = max(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[: rule.top_k or len(ranked)]
    mass = [int(math.exp((logits[token] - highest) / rule.temperature) * MASS) for token in ranked]
    if rule.top_p < 1.0:
        limit = max(1, int(sum(mass) * rule.top_p))
        ranked = [token for i, token in enumerate(ranked) if sum(mass[:i]) < limit]
    if rule.min_p > 0.0:
        floor = highest + rule.temperature * math.log(rule.min_p)
        ranked = [token for token in ranked if logits[token] >= floor]
    return ranked


def sample(
    logits: Sequence[float],
    rule: Rule,
    path: Sequence[int] = (),
    noise: Callable[[int], float] = lambda token: 0.0,
) -> int:
    """The token; NO_TOKEN if logits are not finite or no token is allowed.

    noise: of a token id; not used at temperature 0.
    """
    scores = adjusted(logits, rule, path)
    if any(math.isnan(x) or x == math.inf for x in scores) or max(scores) == -math.inf:
        return NO_TOKEN
    if rule.temperature == 0.0:
        return max(range(len(scores)), key=lambda token: (scores[token], -token))

    def rank(token: int) -> tuple[float, int]:
        return scores[token] + rule.temperature * noise(token), -token

    return max(kept(scores, rule), key=rank)
