"""Mixtures of experts: routers, the experts' products, and layers built from them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels.experts.torch import Choice, Routes, choose
from mamba_eagle.kernels.float8.torch import Operand, Rounding, unrounded
from mamba_eagle.layers.adapters import reading
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mlp import GatedMLP, ReluSquaredMLP, gate_and_up
from mamba_eagle.layers.ops import TORCH, FusedRouter, LayerOps, Product
from mamba_eagle.layers.products import EachExpert, ExpertLayer, GroupedProduct, PackedStack
from mamba_eagle.layers.weights import MatrixLayer, empty_weight
from mamba_eagle.model_config import MoEConfig
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.quantization.matrix import DenseMatrix


class Router(Layer):
    """hidden [n, hidden_size] -> its routes: the top-k logits, with weights from a softmax over
    these alone. weight [E, hidden_size], which is multiplied in float32 if ``exact``, else in its
    dtype."""

    exact = False

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self._packed: Product | None = None
        self._fused: FusedRouter | None = None
        # for benchmarks: where the experts of each call's tokens are left, [most tokens, k] int32
        self.seen: Tensor | None = None
        self.forced = False  # whether they are taken from there instead

    @property
    def choice(self) -> Choice:
        return Choice(self.config.top_k)

    def prepare(self, ops: LayerOps) -> None:
        super().prepare(ops)
        self._fused = ops.pack_router(self.weight.detach(), self.choice)
        if self._fused is None:
            self._packed = ops.pack_linear(self.weight.detach())

    def take_along(self, row: Linear) -> None:
        """Multiply by ``row`` [1, hidden_size], too, if a kernel chooses: ``Routes.share``."""
        if self._fused is not None and row.matrix is None and row.bias is None:
            weights = self.weight.detach(), self.choice, row.weight.detach()
            self._fused = self._ops.pack_router(*weights)

    def forward(self, hidden: Tensor) -> Routes:
        seen = None if self.seen is None else self.seen[: len(hidden)]
        if self._fused is not None:
            routes = self._fused(hidden, None if self.forced else seen)
        else:
            logits = self.logits(hidden)
            scores = None if self.choice.bias is None else self._ops.sigmoid(logits)
            routes = choose(logits, self.choice, scores)
            if seen is not None and not self.forced:
                seen.copy_(routes.experts)
        if self.forced and seen is not None:
            routes = routes._replace(experts=seen.to(routes.experts.dtype))
        return routes

    def watch(self, kind: str, tokens: int, seed: int) -> None:
        """For benchmarks: leave the experts of up to ``tokens`` tokens in ``seen``. kind: model; or
        uniform and same, for experts at random, others for each token, or the first for all."""
        count, k = len(self.weight), self.choice.top_k
        ids = torch.arange(k).expand(tokens, k).contiguous()
        if kind == "uniform":
            generator = torch.Generator().manual_seed(seed)
            ids = torch.rand(tokens, count, generator=generator).topk(k).indices
        self.seen, self.forced = ids.int().to(self.weight.device), kind != "model"

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, E] float32."""
        if self._packed is not None:
            return self._packed(hidden, None).float()
        if self.exact:
            return F.linear(hidden.float(), self.weight.float())
        return F.linear(hidden, self.weight).float()


class SigmoidRouter(Router):
    """Sigmoid scores and a learned bias; see ``Choice``."""

    exact = True

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(config.num_experts, dtype=torch.float32)
        )

    @property
    def choice(self) -> Choice:
        c, bias = self.config, self.e_score_correction_bias.detach()
        return Choice(c.top_k, bias, c.num_groups, c.top_groups, c.normalize, c.scaling)


class Experts(MatrixLayer):
    """The experts' matrices, stacked: up_proj [E, inner, size], down_proj [E, size, width]; a rank
    has some channels of each expert.

    ``inner`` is twice ``width`` if up_proj contains the gate projection too.
    """

    matrix_names = ("up_proj", "down_proj")

    def __init__(self, count: int, size: int, width: int, act: str) -> None:
        """act: relu_squared, or silu_gate with the gate projection."""
        super().__init__()
        self.act, inner = act, width * (1 + (act == "silu_gate"))
        self.up_proj = empty_weight(count, inner, size)
        self.down_proj = empty_weight(count, size, width)
        self._products: dict[str, GroupedProduct] = {}
        self.fused: ExpertLayer | None = None  # what replaces both products and the sum

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        inner, width = self.up_proj.shape[1], self.down_proj.shape[2]
        own = shard.width(width)
        up = rows(own) if inner == width else gate_and_up(own, width)
        return {"up_proj": up.of_stack(), "down_proj": columns(own).of_stack()}

    def prepare(self, ops: LayerOps) -> None:
        super().prepare(ops)
        self.fused = self._fuse()
        if self.fused is not None:
            return
        for name in self.matrix_names:
            weight, matrix = getattr(self, name), self.matrices.get(name)
            given = DenseMatrix(weight.detach()) if matrix is None else matrix
            product = ops.pack_experts(given, weight.dtype)
            if product is not None:
                self._products[name] = product
            elif matrix is not None:
                self.widen(name)
            if isinstance(product, EachExpert):  # which hold the weights from now on
                self.hold(name, PackedStack.of(product))
        if not self._products:
            self.fused = self._fuse()

    def _fuse(self) -> ExpertLayer | None:
        weights = {name: getattr(self, name).detach() for name in self.matrix_names}
        up, down = {**weights, **self.matrices}.values()
        return self._ops.fuse_experts(up, down, self.act, self.up_proj.dtype)

    def share(self, up: Linear | None, down: Linear) -> None:
        """Shared experts' products, which those of the routed ones may take along."""
        if self.fused is None or up is None or up.bias is not None or down.bias is not None:
            return
        both = (up, down)
        self.fused.share(*(p.weight.detach() if p.matrix is None else p.matrix for p in both))

    def _grouped(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        if name in self._products:
            return self._products[name](x, ends)
        weight: Tensor = getattr(self, name)
        return self._ops.grouped_linear(x, weight, ends)

    def forward(
        self,
        x: Operand,
        routes: Routes,
        beside: Callable[[], Tensor] | None = None,
        share: Tensor | None = None,
    ) -> Tensor:
        """x [n, size] -> the weighted sum of each token's experts, [n, size], and of what is
        ``beside`` them: both as of ``ExpertLayer``."""
        if self.fused is not None:
            return self.fused(x, routes, beside, share)
        n, k = routes.experts.shape
        flat = routes.experts.flatten()
        order = flat.argsort(stable=True)  # (token, expert) pairs, by expert
        count = torch.arange(len(self.up_proj), device=x.device)
        ends = torch.searchsorted(flat[order], count, right=True)
        above = self._grouped("up_proj", x[order // k], ends)
        hidden = TORCH.silu_and_mul(above) if self.act == "silu_gate" else TORCH.relu_squared(above)
        assert isinstance(hidden, Tensor)
        outputs = self._grouped("down_proj", hidden, ends)
        # back to token order, so that sums always have the same order and results are reproducible
        back = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=x.device))
        weighted = outputs[back].unflatten(0, (n, k)).float() * routes.weights[..., None]
        routed = weighted.sum(1).to(x.dtype)
        if beside is None:
            return routed
        return routed + (beside() if share is None else self._ops.gate_by_sigmoid(beside(), share))


def gated_experts(config: MoEConfig, size: int) -> Experts:
    return Experts(config.num_experts, size, config.intermediate_size, "silu_gate")


class Mixture(Layer):
    """What layers with experts share: hidden [n, hidden_size] -> [n, hidden_size], of a rank's
    channels a part of the sum. The router is the same on all ranks: it must see equal bits."""

    experts: Experts

    def rehearse(self, device: torch.device) -> None:
        """With tokens in as many numbers as the experts' kernels differ by."""
        if self.experts.fused is not None:
            router = next(each for each in self.children() if isinstance(each, Router))
            parts = [part for part in self.modules() if isinstance(part, Linear)]
            adapted = any(part.additions is not None for part in parts)
            for tokens in self.experts.fused.sizes:
                hidden = router.weight.new_zeros(tokens, router.weight.shape[1])
                self.forward(hidden)
                if adapted:
                    with reading(torch.full((tokens,), -1, device=device)):
                        self.forward(hidden)


class LatentMoE(Mixture):
    """Nemotron 3's layer: relu² experts without a gate, one shared expert for all tokens, and in
    the larger models projections to and from a smaller width around the routed experts."""

    def __init__(self, config: MoEConfig, hidden_size: int, bias: bool) -> None:
        super().__init__()
        size = config.latent_size or hidden_size
        self.gate = SigmoidRouter(config, hidden_size)
        self.experts = Experts(config.num_experts, size, config.intermediate_size, "relu_squared")
        self.shared_experts = ReluSquaredMLP(hidden_size, config.shared_intermediate_size, bias)
        self.has_latent = config.latent_size > 0
        if self.has_latent:
            self.fc1_latent_proj = Linear(hidden_size, size, bias)
            self.fc2_latent_proj = Linear(size, hidden_size, bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        # fc2_latent_proj is linear: it reads the rank's part of the experts' outputs
        if not self.has_latent:
            return {}
        return {"fc2_latent_proj.bias": once(self.fc2_latent_proj.weight.shape[0], shard)}

    def connect(self) -> None:
        self.experts.share(self.shared_experts.up_proj, self.shared_experts.down_proj)

    def forward(self, hidden: Tensor, ctx: ForwardContext | None = None) -> Tensor:
        routes = self.gate(hidden)
        if not self.has_latent:
            return self.experts(hidden, routes, lambda: self.shared_experts(hidden, ctx))
        routed = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(hidden), routes))
        return routed + self.shared_experts(hidden, ctx)


class GatedSharedMoE(Mixture):
    """Qwen's layer: gated experts with softmax weights, and one for all tokens, which passes a
    sigmoid gate of its own."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate = Router(config, hidden_size)
        self.experts = gated_experts(config, hidden_size)
        self.shared_expert = GatedMLP(hidden_size, config.shared_intermediate_size)
        self.shared_expert_gate = Linear(hidden_size, 1)

    def connect(self) -> None:
        self.experts.share(*self.shared_expert.products)
        self.gate.take_along(self.shared_expert_gate)

    @property
    def input_rounding(self) -> Rounding | None:
        """How a norm before this layer may round its inputs to float8, once for routed and shared
        experts; routers read the numbers themselves."""
        fused = self.experts.fused
        own = None if fused is None else fused.input_rounding
        one = own is not None and own.equals(self.shared_expert.input_rounding)
        return own._replace(kept=True) if own is not None and one else None

    @property
    def rounded_from(self) -> int:
        return 0 if self.experts.fused is None else self.experts.fused.rounded_from

    def forward(self, hidden: Operand) -> Tensor:
        exact = unrounded(hidden)
        routes = self.gate(exact)
        share = self.shared_expert_gate(exact) if routes.share is None else routes.share
        return self.experts(hidden, routes, lambda: self.shared_expert(hidden), share)


class GatedMoE(Mixture):
    """Granite's routed experts: gate and up projection in one matrix, softmax weights."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.router = Router(config, hidden_size)
        self.experts = gated_experts(config, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, self.router(hidden))


class SigmoidMoE(Mixture):
    """Gated experts chosen by sigmoid scores, and shared ones beside them (DeepSeek-V3)."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate = SigmoidRouter(config, hidden_size)
        self.experts = gated_experts(config, hidden_size)
        self.has_shared = config.shared_intermediate_size > 0
        if self.has_shared:
            self.shared_experts = GatedMLP(hidden_size, config.shared_intermediate_size)

    def connect(self) -> None:
        if self.has_shared:
            self.experts.share(*self.shared_experts.products)

    def forward(self, hidden: Tensor) -> Tensor:
        beside = (lambda: self.shared_experts(hidden)) if self.has_shared else None
        return self.experts(hidden, self.gate(hidden), beside)
