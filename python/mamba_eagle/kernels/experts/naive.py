"""Mixtures of experts, token by token and slot by slot in float64.

    y_t = Σ_slot w_{t,slot} · D_e act(U_e x_t)     e = the expert in that slot of the token

act: relu(u)² (Primer, arXiv 2109.08668), or silu(gate) · up, where U_e has the rows of the gate
before those of the up projection (SwiGLU, arXiv 2002.05202).
"""

import math

import torch
from torch import Tensor


def activated(sums: Tensor, act: str) -> Tensor:
    """[inner] -> [width], float64."""
    if act == "relu_squared":
        return torch.tensor([max(u, 0.0) ** 2 for u in sums.tolist()], dtype=torch.float64)
    half = len(sums) // 2
    made = [
        g / (1.0 + math.exp(-g)) * u for g, u in zip(sums[:half].tolist(), sums[half:].tolist())
    ]
    return torch.tensor(made, dtype=torch.float64)


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
    """x [n, size]; ids, weights [n, k]; up [E, inner, size], down [E, size, width] -> [n, size]
    float64."""
    y = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for t, (chosen, shares) in enumerate(zip(ids.tolist(), weights.tolist())):
        for expert, share in zip(chosen, shares):
            made = activated(up[expert].double() @ x[t].double(), act)
            y[t] += share * (down[expert].double() @ made)
    return y


def route(
    hidden: Tensor,
    weight: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    normalize: bool = True,
    scaling: float = 1.0,
) -> tuple[list[list[int]], list[list[float]]]:
    """hidden [n, size], weight [E, size]; with a bias [E] the experts with the largest biased
    sigmoids, else with the largest logits; of equal ones the first. -> experts and weights."""
    ids, shares = [], []
    for token in hidden.double():
        logits = (weight.double() @ token).tolist()
        scores, keys = logits, logits
        if bias is not None:
            scores = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
            keys = [score + b for score, b in zip(scores, bias.tolist())]
        chosen = sorted(range(len(keys)), key=lambda expert: (-keys[expert], expert))[:top_k]
        own = [scores[expert] for expert in chosen]
        if bias is None:
            own = [math.exp(score - max(own)) for score in own]
        if bias is None or normalize:
            total = sum(own)
            own = [share / total for share in own]
        ids.append(chosen)
        shares.append([share * (scaling if bias is not None else 1.0) for share in own])
    return ids, shares
