"""The experts' grouped products against one product a token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mamba_eagle.kernels.relu_squared.naive import relu_squared
from mamba_eagle.layers.moe import Experts, Routes


def one_by_one(experts: Experts, x: Tensor, routes: Routes) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    up, down = experts.up_proj.double(), experts.down_proj.double()
    for i, (chosen, weights) in enumerate(zip(routes.experts.tolist(), routes.weights.tolist())):
        for expert, weight in zip(chosen, weights):
            out[i] += weight * (down[expert] @ relu_squared(up[expert] @ x[i].double()))
    return out


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        pytest.param("cpu", torch.float32, 1e-5, id="cpu"),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_experts_equal_one_product_a_token(
    device: str, dtype: torch.dtype, tolerance: float, tokens: int
) -> None:
    """Most experts get no token at all when there is one token."""
    torch.manual_seed(tokens)
    experts = Experts(16, 64, 48, "relu_squared").requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.2)
    experts = experts.to(device, dtype)
    x = torch.randn(tokens, 64).to(device, dtype)
    chosen = torch.rand(tokens, 16).topk(3).indices.to(device)
    routes = Routes(chosen, torch.rand(tokens, 3).to(device))
    expected = one_by_one(experts, x, routes)
    error = (experts(x, routes) - expected).norm() / expected.norm()
    assert error <= tolerance
