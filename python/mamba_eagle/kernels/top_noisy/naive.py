"""The k best guesses of a sample, by sorting, in float64.

    score_t = logit_t / temperature + noise(id_t)        logit_t at temperature 0
    log p_t = score_t - log Σ_v exp(score_v)

The target samples the token with the highest such score of its own logits. id_t is the target's
token for token t of a drafter, whose vocabulary may be a part of the target's. Of equal scores the
lower t comes first.
"""

from collections.abc import Callable, Sequence

from mamba_eagle.kernels.top_log_probs.naive import Top, top_log_probs


def top_noisy(
    logits: Sequence[float],
    ids: Sequence[int],
    temperature: float,
    noise: Callable[[int], float],
    k: int,
) -> Top:
    """logits: one per token, -inf where a token is impossible; ids: as many; k: at most as many."""
    scores = list(logits)
    if temperature > 0.0:
        scores = [x / temperature + noise(token) for x, token in zip(logits, ids, strict=True)]
    log_probs, best = top_log_probs(scores, k)
    return Top(log_probs, [ids[t] for t in best])
