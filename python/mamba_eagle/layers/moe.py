"""Mixtures of experts: routers, the experts' products, and layers built from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.gated_mlp import activation, gated
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mlp import ReluSquaredMLP
from mamba_eagle.layers.ops import TORCH, LayerOps, Product
from mamba_eagle.layers.products import GroupedProduct
from mamba_eagle.layers.weights import MatrixLayer, empty_weight
from mamba_eagle.model_config import MoEConfig, Span
from mamba_eagle.parallel.cut import Cut, once, rows
from mamba_eagle.parallel.shard import Shard


class Routes(NamedTuple):
    """The k experts that process each of n tokens."""

    experts: Tensor  # [n, k] int64
    weights: Tensor  # [n, k] float32


class Router(Layer):
    """weight [E, hidden_size], which is multiplied in float32 if ``exact``, else in its dtype."""

    exact = False

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self._ops = TORCH
        self._packed: Product | None = None

    def prepare(self, ops: LayerOps) -> None:
        self._ops = ops
        self._packed = ops.pack_linear(self.weight.detach())

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, E] float32."""
        if self._packed is not None:
            return self._packed(hidden, None).float()
        if self.exact:
            return F.linear(hidden.float(), self.weight.float())
        return F.linear(hidden, self.weight).float()


class SigmoidRouter(Router):
    """Sigmoid scores; a learned bias affects which experts are chosen, but not their weights
    (DeepSeek-V3, arXiv 2412.19437). Only experts of the best groups are eligible; a group's score
    is the sum of its two best biased scores."""

    exact = True

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.config = config
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(config.num_experts, dtype=torch.float32)
        )

    def forward(self, hidden: Tensor) -> Routes:
        """hidden: [n, hidden_size]."""
        c = self.config
        scores = self._ops.sigmoid(self.logits(hidden))
        biased = scores + self.e_score_correction_bias
        if c.num_groups > 1:
            groups = biased.unflatten(-1, (c.num_groups, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).topk(c.top_groups, dim=-1).indices
            excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
            biased = groups.masked_fill(excluded[..., None], float("-inf")).flatten(-2)
        experts = biased.topk(c.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if c.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routes(experts, weights * c.scaling)


class SoftmaxRouter(Router):
    """The top-k logits, with weights from a softmax over these alone (Mixtral, Granite)."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.top_k = config.top_k

    def forward(self, hidden: Tensor) -> Routes:
        """hidden: [n, hidden_size]."""
        best, experts = self.logits(hidden).topk(self.top_k, dim=-1)
        return Routes(experts, best.softmax(-1))


class Experts(MatrixLayer):
    """The experts' matrices, stacked: up_proj [E, inner, size], down_proj [E, size, width]; of a
    rank's experts alone if ``held`` says which of ``count`` they are.

    ``inner`` is twice ``width`` if up_proj contains the gate projection too.
    """

    matrix_names = ("up_proj", "down_proj")

    def __init__(
        self,
        count: int,
        size: int,
        width: int,
        inner: int,
        act: Callable[[Tensor], Tensor],
        held: Span | None = None,
    ) -> None:
        super().__init__()
        self.act, self.held = act, held
        count = self.count = count if held is None else held.size
        self.up_proj = empty_weight(count, inner, size)
        self.down_proj = empty_weight(count, size, width)
        self._ops = TORCH
        self._products: dict[str, GroupedProduct] = {}  # of matrices of few bits

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        return dict.fromkeys(("up_proj", "down_proj"), rows(shard.span(self.up_proj.shape[0])))

    def prepare(self, ops: LayerOps) -> None:
        self._ops = ops
        for name, matrix in list(self.matrices.items()):
            product = ops.pack_experts(matrix, getattr(self, name).dtype)
            if product is None:
                self.widen(name)
            else:
                self._products[name] = product

    def _grouped(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        if name in self._products:
            return self._products[name](x, ends)
        weight: Tensor = getattr(self, name)
        return self._ops.grouped_linear(x, weight, ends)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """x [n, size] -> the weighted sum of each token's experts, or of those among them that this
        rank holds, [n, size]."""
        n, k = routes.experts.shape
        flat = routes.experts.flatten()
        if self.held is not None:
            flat = local_experts(flat, self.held)
        order = flat.argsort(stable=True)  # (token, expert) pairs, by expert
        ends = torch.searchsorted(
            flat[order], torch.arange(self.count, device=x.device), right=True
        )
        hidden = self.act(self._grouped("up_proj", x[order // k], ends))
        outputs = self._grouped("down_proj", hidden, ends)
        # back to token order, so that sums always have the same order and results are reproducible
        back = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=x.device))
        each = outputs[back]
        if self.held is not None:  # entries of other ranks' experts are arbitrary
            each = each.masked_fill((flat == self.held.size)[:, None], 0.0)
        weighted = each.unflatten(0, (n, k)).float() * routes.weights[..., None]
        return weighted.sum(1).to(x.dtype)


def local_experts(experts: Tensor, held: Span) -> Tensor:
    """The indices among the experts ``held``, and for all others the index after these."""
    own = experts - held.begin
    return torch.where((own >= 0) & (own < held.size), own, held.size)


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


class LatentMoE(Layer):
    """Nemotron 3's layer: relu² experts without a gate, one shared expert for all tokens, and in
    the larger models projections to and from a smaller width around the routed experts.

    hidden [n, hidden_size] -> [n, hidden_size], of a rank's experts and of its part of the shared
    one a part of the sum. The router is the same on all ranks: it must see equal bits on all.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, bias: bool) -> None:
        super().__init__()
        size = config.latent_size or hidden_size
        inner = config.intermediate_size
        self.gate = SigmoidRouter(config, hidden_size)
        self.experts = Experts(config.num_experts, size, inner, inner, relu_squared, config.held)
        self.shared_experts = ReluSquaredMLP(hidden_size, config.shared_intermediate_size, bias)
        self.has_latent = config.latent_size > 0
        if self.has_latent:
            self.fc1_latent_proj = Linear(hidden_size, size, bias)
            self.fc2_latent_proj = Linear(size, hidden_size, bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        # fc2_latent_proj is linear: it reads the rank's part of the experts' sum
        if not self.has_latent:
            return {}
        return {"fc2_latent_proj.bias": once(self.fc2_latent_proj.weight.shape[0], shard)}

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        routes = self.gate(hidden)
        if self.has_latent:
            routed = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(hidden), routes))
        else:
            routed = self.experts(hidden, routes)
        return routed + self.shared_experts(hidden, ctx)


class GatedMoE(Layer):
    """Granite's routed experts: gate and up projection in one matrix, softmax weights.

    hidden [n, hidden_size] -> [n, hidden_size], of a rank's experts a part of the sum.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, act: str) -> None:
        super().__init__()
        width, act_fn = config.intermediate_size, activation(act)
        self.router = SoftmaxRouter(config, hidden_size)
        self.experts = Experts(
            config.num_experts,
            hidden_size,
            width,
            2 * width,
            lambda both: gated(both, act_fn),
            config.held,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, self.router(hidden))
