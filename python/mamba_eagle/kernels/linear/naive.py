"""The product with a matrix, in float64."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in], weight [out, in], bias [out] -> [n, out] float64."""
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()
