"""The best token of each row in one pass: torch's ``max`` with indices looks at one number after
the other, and where it uses threads it waits for them to wake."""

import numpy as np

from mamba_eagle.cpu.vector_math import ZERO
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.machine_code import INFINITE, SIZE, exactly, ordered

BLOCK = 2048  # scores whose largest is found in vectors before anyone asks which it is


@exactly
def best_of(scores, tokens):  # noqa: ANN001, ANN201
    """As torch.py's: scores [n, V] float32; out: tokens [n] int64."""
    bits, size = scores.view(np.int32), scores.shape[1]
    for r in range(scores.shape[0]):
        row, numbers = scores[r], bits[r]
        found, first, largest = np.int32(-(2**31)), 0, np.int32(0)
        for begin in range(0, size, BLOCK):
            most = np.int32(-(2**31))
            for i in range(begin, min(begin + BLOCK, size)):
                most = max(most, ordered(numbers[i]))
                largest = max(largest, np.int32(numbers[i] & SIZE))
            if most > found:
                found, first = most, begin
        best = np.int32(ordered(found)).view(np.float32)
        tokens[r] = NO_TOKEN
        if largest > INFINITE or not np.isfinite(best):
            continue
        if best == ZERO:  # -0 is not less
            first = 0
        for i in range(first, size):
            if row[i] == best:
                tokens[r] = i
                break
