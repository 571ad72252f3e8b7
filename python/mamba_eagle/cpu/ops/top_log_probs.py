"""The k best of each row in one pass: k is small, and torch's topk would sort."""

from math import log

import numpy as np

from mamba_eagle.cpu.vector_math import ZERO, exp
from mamba_eagle.machine_code import exactly, kernel


@kernel
def insert(score, number, scores, numbers):
    """Put a score among the best so far, which fall, in place of the last one.

    scores, numbers [k]. Of equal scores the one that came first stays ahead.
    """
    at = scores.shape[0] - 1
    while at > 0 and scores[at - 1] < score:
        scores[at], numbers[at] = scores[at - 1], numbers[at - 1]
        at -= 1
    scores[at], numbers[at] = score, number


@kernel
def best(rows, values, tokens):
    """rows [n, V]; out: values, tokens [n, k]. Of equals the lower token id comes first."""
    k = values.shape[1]
    for r in range(rows.shape[0]):
        row, best, best_tokens = rows[r], values[r], tokens[r]
        best[:], best_tokens[:] = -np.inf, 0
        for token in range(min(k, row.shape[0])):  # whatever their logits, which may be -inf
            insert(row[token], token, best[: token + 1], best_tokens[: token + 1])
        for token in range(k, row.shape[0]):
            if row[token] > best[k - 1]:
                insert(row[token], token, best, best_tokens)


@exactly
def _log_prob(logit, largest, rest):
    """In this order: ``largest + rest`` would be rounded to the digits of large logits."""
    return (logit - largest) - rest


@kernel
def top_log_probs(logits, values, tokens):
    """The same of the rows' log_softmax, in the order of the logits. logits [n, V]."""
    best(logits, values, tokens)
    for r in range(logits.shape[0]):
        row, top, total = logits[r], values[r], ZERO
        largest = top[0]
        for token in range(row.shape[0]):
            total += exp(row[token] - largest)
        rest = np.float32(log(total))
        for i in range(top.shape[0]):
            top[i] = _log_prob(top[i], largest, rest)
