"""What adapters add to a product, in float64."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """An adapter of one matrix of the product."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r], with the scale in it
    first: int  # of the product's outputs, the first that is the matrix's


def added(y: Tensor, x: Tensor, slots: Sequence[int], adapters: Sequence[Sequence[Part]]) -> Tensor:
    """``y_i + B A x_i`` of row i's adapter, by matrix (Hu et al. 2021, arXiv 2106.09685).

    y [n, width], x [n, in]; slots: of each row its place in ``adapters``; -1: none.
    Returns: [n, width] float64.
    """
    found = y.double().clone()
    for i, slot in enumerate(slots):
        for down, up, first in adapters[slot] if slot >= 0 else ():
            found[i, first : first + len(up)] += up.double() @ (down.double() @ x[i].double())
    return found
