"""What a delta rule's token feeds into its pass: gates, and keys and queries of length 1.

H heads of P values, G heads of queries and keys of size N.
"""

from math import sqrt

import numpy as np

from mamba_eagle.cpu.vector_math import ONE, sigmoid_of, softplus
from mamba_eagle.cpu.vectors.squares import sum_of_squares
from mamba_eagle.cpu.vectors.states import decay_of
from mamba_eagle.machine_code import strictly

L2_EPS = np.float32(1e-6)  # as layers/delta_rule.py's


@strictly
def _length(numbers):  # noqa: ANN001, ANN202
    return np.float32(sqrt(sum_of_squares(numbers) + L2_EPS))


@strictly
def arrange(convolved, N, row, queries):  # noqa: ANN001, ANN201
    """convolved [2*G*N + H*P]: queries, keys, values -> row [H*P + G*N]: values, then keys;
    queries [G*N], divided by sqrt(N) as well. Slices of it lie one after the other."""
    size = len(queries)
    inner = len(row) - size
    for c in range(inner):
        row[c] = convolved[2 * size + c]
    share = ONE / np.float32(sqrt(N))
    for first in range(0, size, N):
        of_q = share / _length(convolved[first : first + N])
        of_k = ONE / _length(convolved[size + first : size + first + N])
        for n in range(first, first + N):
            queries[n] = convolved[n] * of_q
            row[inner + n] = convolved[size + n] * of_k


@strictly
def delta_gates(raw, heads, high, gates, decay):  # noqa: ANN001, ANN201
    """A token's raw [2 H], of decays and of betas -> gates [2 H]: g, then beta; decay [H]: exp(g).

    heads [3, H]: the rate, which is negative, and the bias of g; high: what beta is at most.
    """
    H = len(decay)
    for h in range(H):
        gates[h] = heads[0, h] * softplus(raw[h] + heads[1, h])
        gates[H + h] = high * sigmoid_of(raw[H + h])
        decay[h] = decay_of(gates[h], ONE)


@strictly
def arrange_token(row, N, inner):  # noqa: ANN001, ANN201
    """The same in place, of a row with queries behind the keys."""
    end = (len(row) + inner) // 2
    arrange(row.copy(), N, row[:end], row[end:])
