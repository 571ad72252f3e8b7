"""Mixtures of experts: routing, sorting and products of every form, against naive.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import hopper_rig  # noqa: F401 - for the interpreted module
import pytest
import torch
from forms import DEVICE, GPU, in_the_interpreter, runs_kernels
from gluon_rig import Block, interpreted
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.backend.triton import experts as fused
from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.kernels.experts import gluon as hopper
from mamba_eagle.kernels.experts import naive, triton_routes
from mamba_eagle.kernels.experts.torch import Choice, Routes, choose
from mamba_eagle.kernels.experts.triton import Pairs
from mamba_eagle.kernels.experts.triton_routes import route
from mamba_eagle.kernels.float8.torch import (
    LARGEST,
    SMALLEST_SCALE,
    Rounded,
    Rounding,
    rounded,
    to_e4m3,
    widened,
)
from mamba_eagle.layers.adapters import AdapterSize, reading
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.mlp import gate_and_up
from mamba_eagle.layers.moe import GatedSharedMoE, LatentMoE, SigmoidMoE
from mamba_eagle.model_config import MoEConfig
from mamba_eagle.models.loader import random_weights
from mamba_eagle.parallel.cut import columns, rows
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.quantization.matrix import Float8Matrix, quantized

test_in_the_interpreter = in_the_interpreter

DTYPE = torch.bfloat16
ERROR = 1e-2  # of bfloat16 numbers between the products
FLOAT8_ERROR = 3e-2  # and of those that fall to either side of a tie between float8 numbers


@pytest.fixture(autouse=True)
def has_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(fused, "capability", lambda device: (9, 0))


def normal(*shape: int, seed: int) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, DTYPE)


def summable(x: Tensor) -> Tensor:
    """Products of such numbers have the same sum in any order: the interpreter's are NumPy's, which
    adds up some columns in another order on some processors. A GPU's order is what is tested."""
    return x if GPU else (x * 64).round() / 64


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).norm() / exact.norm())


# ── routing ──


CHOICES = {
    "sigmoid": Choice(6, torch.linspace(-0.5, 0.5, 40), scaling=2.5),
    "sigmoid-not-normalised": Choice(3, torch.zeros(40), normalize=False),
    "softmax": Choice(5),
}


@runs_kernels
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_tokens_go_to_the_experts_of_the_definition(choice: Choice) -> None:
    hidden, weight = normal(20, 300, seed=1), normal(40, 300, seed=2) * 0.05
    on_device = choice if choice.bias is None else choice._replace(bias=choice.bias.to(DEVICE))
    found = route(hidden, weight, on_device)
    given = (choice.top_k, choice.bias, choice.normalize, choice.scaling)
    ids, weights = naive.route(hidden.cpu(), weight.cpu(), *given)
    assert found.experts.tolist() == ids
    torch.testing.assert_close(found.weights.cpu().double(), torch.tensor(weights).double(),
                               rtol=1e-5, atol=1e-6)  # fmt: skip


@runs_kernels
def test_of_equal_experts_the_first_is_taken_and_nan_is_the_last() -> None:
    hidden, weight = summable(normal(2, 64, seed=4)), summable(normal(1, 64, seed=3))
    weight = weight.expand(8, 64).contiguous()
    assert route(hidden, weight, Choice(3)).experts.tolist() == [[0, 1, 2]] * 2
    hidden = torch.full((1, 64), float("nan"), device=DEVICE, dtype=DTYPE)
    assert route(hidden, weight, Choice(3)).experts.tolist() == [[0, 1, 2]]


@runs_kernels
@pytest.mark.parametrize("experts", [40, 130])
def test_a_tokens_experts_do_not_depend_on_its_batch(
    monkeypatch: pytest.MonkeyPatch, experts: int
) -> None:
    """Of many tokens a program adds up all shares of the columns."""
    most = max(triton_routes.TILES)
    if not GPU:
        tiles, most = triton_routes.TILES, 60
        monkeypatch.setattr(triton_routes, "TILES", {16: tiles[16], most: tiles[32]})
    hidden = summable(normal(most + 10, 600, seed=1))
    weight = summable(normal(experts, 600, seed=2) * 0.05)
    choice = Choice(6, torch.zeros(experts, device=DEVICE), scaling=2.5)
    beside = summable(normal(1, 600, seed=3))
    whole = route(hidden, weight, choice, beside=beside)
    assert whole.share is not None
    torch.testing.assert_close(whole.share.cpu(), hidden.float().cpu() @ beside.float().cpu().T)
    for n in (1, 17, most):
        part = route(hidden[:n], weight, choice, beside=beside)
        assert all(torch.equal(own, all_[:n]) for own, all_ in zip(part, whole, strict=True))
    alone = route(hidden, weight, choice)
    assert alone.share is None and torch.equal(alone.weights, whole.weights)


def test_groups_exclude_experts_of_others() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.9, 2.8, -1.0, 4.0]])  # groups of two: 5, 5.7, 3
    choice = Choice(2, torch.zeros(6), num_groups=3, top_groups=1)
    assert choose(logits, choice).experts.tolist() == [[2, 3]]


PAIRS = {  # tokens, top_k, experts, those that are used
    "few": (1, 4, 12, range(12)),
    "most-of-one-launch": (512, 4, 12, range(12)),
    "in-chunks": (513, 4, 12, range(12)),
    "many-chunks": (811, 6, 40, range(3, 40, 5)),
    "one-expert": (2077, 1, 1, range(1)),
}


@runs_kernels
@pytest.mark.parametrize(("tokens", "top_k", "experts", "used"), PAIRS.values(), ids=PAIRS)
def test_pairs_are_sorted_by_expert(
    monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int, experts: int, used: range
) -> None:
    monkeypatch.setattr(triton_routes, "MAX_PAIRS", 2048)
    if not GPU:  # the interpreter sorts slowly: an eighth of all sizes
        tokens = -(-tokens // 8)
        for name, size in (("FEW_PAIRS", 64), ("MAX_PAIRS", 256), ("CHUNK", 8)):
            monkeypatch.setattr(triton_routes, name, size)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, len(used), generator=generator).topk(top_k).indices
    ids = torch.tensor(used)[ids].int().to(DEVICE)
    x = normal(tokens, 100, seed=5)
    found = triton_routes.sort_pairs(ids, experts, x, Rounding())
    flat = ids.flatten().tolist()
    mine = [[i for i, expert in enumerate(flat) if expert == e] for e in range(experts)]
    order = sum(mine, [])
    assert found.order.tolist() == order
    ends = torch.tensor([len(each) for each in mine]).cumsum(0)
    assert found.ends.tolist() == ends.tolist()
    rows = [
        [e, int(end) - len(each), int(end)]
        for e, (each, end) in enumerate(zip(mine, ends))
        if each or len(flat) > triton_routes.FEW_PAIRS
    ]
    assert found.table[0] == len(rows)
    assert found.table[1 : 1 + 3 * len(rows)].view(-1, 3).tolist() == rows
    assert found.back.cpu()[order].tolist() == list(range(len(order)))
    wanted = rounded(x, Rounding())
    assert torch.equal(found.largest, x.float().abs().amax(1))
    assert torch.equal(found.rounded.float(), wanted.values.float())


# ── products ──


class Case(NamedTuple):
    """Experts of a kind of weights."""

    kind: str  # of weights
    act: str = "relu_squared"
    shared: int = 0  # of the experts' width
    width: int = 72


CASES = {
    "bfloat16": Case("bfloat16", shared=2),
    "bfloat16-gated": Case("bfloat16", "silu_gate", shared=2),
    "float8-rows": Case("rows", shared=2),
    "float8-rows-gated": Case("rows", "silu_gate", shared=1),
    "float8-tensor": Case("tensor", shared=2),
    "float8-blocks": Case("blocks", width=144, shared=1),
    "float8-blocks-gated": Case("blocks", "silu_gate", width=144, shared=1),
    "float8-blocks-alone": Case("blocks", "silu_gate", width=144),
}
EXPERTS, TOP_K, SIZE = 5, 2, 160


def as_float8(weight: Tensor, kind: str) -> Float8Matrix:
    if kind == "rows":
        return quantized(weight)
    if kind == "tensor":
        scale = torch.full((*weight.shape[:-2], 1, 1), 0.01, device=DEVICE)
        static = Rounding(torch.full((1, 1), 0.02, device=DEVICE))
        return Float8Matrix(to_e4m3(weight.float() / scale), scale, None, static)
    blocks = [-(-length // 128) for length in weight.shape[-2:]]
    scale = torch.linspace(0.01, 0.02, blocks[0] * blocks[1], device=DEVICE).view(blocks)
    scale = scale.expand(*weight.shape[:-2], *blocks)
    whole = scale.repeat_interleave(128, -1).repeat_interleave(128, -2)
    values = weight.float() / whole[..., : weight.shape[-2], : weight.shape[-1]]
    return Float8Matrix(to_e4m3(values), scale, (128, 128), Rounding(group=128))


def contiguous(weight: Tensor | Float8Matrix) -> Tensor | Float8Matrix:
    """As a device gets it from the host."""
    if isinstance(weight, Tensor):
        return weight.contiguous()
    parts = {name: part.contiguous() for name, part in weight.tensors().items()}
    return replace(weight, **parts)


class Layer:
    """Experts with the reference that reads the same weights."""

    def __init__(self, case: Case) -> None:
        inner = case.width * (2 if case.act == "silu_gate" else 1)
        self.case = case
        weights = [normal(EXPERTS, inner, SIZE, seed=1), normal(EXPERTS, SIZE, case.width, seed=2)]
        shared = [
            normal(case.shared * inner, SIZE, seed=3),
            normal(SIZE, case.shared * case.width, seed=4),
        ]
        if case.kind != "bfloat16":
            weights = [as_float8(weight * 0.1, case.kind) for weight in weights]
            if case.shared:
                shared = [as_float8(weight * 0.1, case.kind) for weight in shared]
        self.exact, self.exact_shared = map(self._exact, (weights, shared))
        self.rounding = getattr(weights[0], "rounding", None)
        self.weights, self.shared = weights, shared
        self.fused = self.part(Shard())

    def part(self, shard: Shard) -> fused.FusedExperts:
        """A rank's channels of all experts."""
        own = self.cut(self.weights, self.case.width, shard)
        made = fused.fuse_experts(*own, self.case.act, DTYPE, None)
        assert made is not None
        made.library = False  # it has products for prompts only
        if self.case.shared:
            made.share(*self.cut(self.shared, self.case.shared * self.case.width, shard))
            assert made.shared == self.case.shared
        return made

    def cut(self, matrices: list, width: int, shard: Shard) -> list:
        if shard.size == 1:
            return matrices
        own, gated = shard.width(width), self.case.act == "silu_gate"
        cuts = [gate_and_up(own, width) if gated else rows(own), columns(own)]
        if len(matrices[0].shape) == 3:
            cuts = [cut.of_stack() for cut in cuts]
        return [contiguous(cut.of(matrix)) for cut, matrix in zip(cuts, matrices, strict=True)]

    def _exact(self, weights: list) -> list[Tensor]:
        return [
            (each if isinstance(each, Tensor) else each.dequantize()).double().cpu()
            for each in weights
        ]

    def seen(self, x: Tensor) -> Tensor:
        """What a product sees of its inputs."""
        if self.rounding is None:
            return x.double().cpu()
        return widened(rounded(x.to(DEVICE, DTYPE), self.rounding)).double().cpu()

    def one(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        above = torch.stack([naive.activated(up @ row, self.case.act) for row in self.seen(x)])
        return self.seen(above) @ down.t()

    def reference(self, x: Tensor, routes: Routes, share: Tensor | None = None) -> Tensor:
        if self.rounding is None:
            up, down = self.exact
            given = (x.cpu(), routes.experts, routes.weights, up, down, self.case.act)
            y = naive.experts(*given)
        else:
            y = torch.zeros(len(x), SIZE, dtype=torch.float64)
            each = [self.one(x, up, down) for up, down in zip(*self.exact)]
            for t, (ids, weights) in enumerate(
                zip(routes.experts.tolist(), routes.weights.tolist())
            ):
                for expert, weight in zip(ids, weights):
                    y[t] += weight * each[expert][t]
        if self.case.shared:
            y += self.one(x, *self.exact_shared) * (1.0 if share is None else share)
        return y


def inputs(tokens: int) -> tuple[Tensor, Routes]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    if tokens > 2:
        ids[1:3, 0] = ids[1:3, 1]  # an expert twice
        ids[3:, 0] = 2  # and one that has most tokens
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return normal(tokens, SIZE, seed=6), Routes(ids.int().to(DEVICE), weights.to(DEVICE))


TOKENS = (1, 2, 35, 64, 65, 256, 257) if GPU else (1, 20)


@runs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_experts_are_those_of_the_definition(case: Case) -> None:
    layer = Layer(case)
    for tokens in TOKENS:
        x, routes = inputs(tokens)
        dense = None
        if case.shared:
            dense = lambda x=x: layer.one(x, *layer.exact_shared).to(DEVICE, DTYPE)  # noqa: E731
        logits = normal(tokens, 1, seed=9) if case.act == "silu_gate" and case.shared else None
        share = None if logits is None else logits.double().sigmoid().cpu()
        found = layer.fused(x, routes, dense, logits)
        error = relative_error(found, layer.reference(x, routes, share))
        assert error < (ERROR if layer.rounding is None else FLOAT8_ERROR), tokens
        if GPU:  # the interpreter has one order
            again = layer.fused(x, routes, dense, logits)
            assert torch.equal(found, again), "the same bits again"


PARTS = {
    "bfloat16": (Case("bfloat16", shared=2, width=96), [48, 48]),
    "bfloat16-gated": (Case("bfloat16", "silu_gate", shared=1, width=72), [24, 24, 24]),
    "bfloat16-unequal": (Case("bfloat16", width=112), [32, 32, 48]),
    "float8-rows-gated": (Case("rows", "silu_gate", shared=2), [36, 36]),
    "float8-tensor": (Case("tensor", shared=2), [36, 36]),
    "float8-blocks": (Case("blocks", width=336), [128, 208]),
    "float8-blocks-gated": (Case("blocks", "silu_gate", width=384, shared=1), [128, 256]),
}


@runs_kernels
@pytest.mark.parametrize(("case", "widths"), PARTS.values(), ids=PARTS)
def test_the_channels_of_all_ranks_add_up_to_the_experts(case: Case, widths: list[int]) -> None:
    """Of as many ranks as there are widths; weights keep their few bits."""
    layer, ranks = Layer(case), len(widths)
    together = 128 if case.kind == "blocks" else 1
    parts = [layer.part(Shard(rank, ranks, together)) for rank in range(ranks)]
    assert [part.down.weight.shape[2] for part in parts] == widths
    assert all(part.up.weight.dtype == layer.fused.up.weight.dtype for part in parts)
    for tokens in TOKENS[:2]:
        x, routes = inputs(tokens)
        beside = (lambda x=x: x) if case.shared else None  # not called: it is in the same launches
        total = sum(part(x, routes, beside).double().cpu() for part in parts)
        error = relative_error(total, layer.reference(x, routes))
        assert error < (ERROR if layer.rounding is None else FLOAT8_ERROR), tokens


@runs_kernels
@pytest.mark.parametrize("act", ["relu_squared", "silu_gate"])
def test_groups_that_were_rounded_before(act: str) -> None:
    """By a launch, as those of many tokens are."""
    layer = Layer(Case("blocks", act, width=144))
    layer.fused.max_rounded_as_read = 0
    for tokens in (21, 301, 600) if GPU else (21,):
        x, routes = inputs(tokens)
        error = relative_error(layer.fused(x, routes), layer.reference(x, routes))
        assert error < FLOAT8_ERROR, tokens


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("tokens", [513, 4100])
def test_kernels_of_prompts_give_what_tiles_give(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """One expert has no tokens."""
    up, down = normal(EXPERTS + 1, 512, 512, seed=1), normal(EXPERTS + 1, 512, 256, seed=2)
    given = [as_float8(weight * 0.1, "blocks") for weight in (up, down)]
    layer = fused.fuse_experts(*given, "silu_gate", DTYPE, None)
    assert layer is not None
    assert layer.prompts
    _, routes = inputs(tokens)
    x = normal(tokens, 512, seed=7)
    calls, gated_experts = [], hopper.gated_experts

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return gated_experts(*args)

    monkeypatch.setattr(hopper, "gated_experts", counted)
    found = layer._each(x, Pairs(routes, None, 0))
    assert len(calls) == 1 and layer.input_rounding is not None
    kept = TritonOps().round(x, layer.input_rounding._replace(kept=True))
    assert torch.equal(layer._each(kept, Pairs(routes, None, 0)), found)
    layer.prompts, layer.max_rounded_as_read = False, 0
    assert torch.equal(found, layer._each(x, Pairs(routes, None, 0)))


@pytest.mark.skipif(GPU, reason="the test above runs them")
def test_kernels_of_prompts_give_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: an expert has no pairs, one a few, one more than a tile."""
    tokens, experts, rounding = 100, 5, Rounding(group=128)
    (kernels,) = interpreted("experts.gluon")
    layer = [
        as_float8(torch.randn(experts, *size, generator=torch.Generator().manual_seed(1)), "blocks")
        for size in ((512, 256), (256, 256))
    ]
    up, down = (fused.stack_of(each) for each in layer)
    ids = torch.arange(tokens * 2).view(tokens, 2) % 2 * 3
    ids[:15, 0], ids[20:80, 1] = 1, 4
    order = ids.flatten().argsort(stable=True).int()
    ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int()
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(2)).to(DTYPE)

    def by_groups(x: Tensor, rounding: Rounding) -> Rounded:
        found = rounded(x, rounding)
        return found._replace(scale=found.scale.t().contiguous().t())

    def room(n: int, size: int, rounding: Rounding, device: torch.device) -> Rounded:
        return by_groups(torch.empty(n, size), rounding)

    on_tensors = {
        "silu": torch.nn.functional.silu,
        "to_e4m3": to_e4m3,
        "token_scale": lambda x, axis: (x.abs().amax(axis) / LARGEST).clamp(min=SMALLEST_SCALE),
    }
    for name, function in on_tensors.items():
        taken = lambda x, *axis, f=function: Block(f(x.value, *axis))  # noqa: E731
        monkeypatch.setattr(kernels, name, taken)
    monkeypatch.setattr(kernels, "rounded", by_groups)
    monkeypatch.setattr(kernels, "empty_rounded", room)
    monkeypatch.setattr(kernels, "PROCESSORS", 3)
    none = torch.empty(0)
    place = triton_routes.Sorted(order, ends, none, none, none, none)
    found = kernels.gated_experts(x, up, down, place)
    seen = widened(rounded(x, rounding))
    for pair, expert in enumerate(ids.flatten().tolist()):
        above, below = (each.dequantize()[expert].float() for each in layer)
        gate, value = (above @ seen[pair // 2]).chunk(2)
        made = (torch.nn.functional.silu(gate) * value).to(DTYPE)
        wanted = below @ widened(rounded(made[None], rounding))[0]
        assert relative_error(found[pair], wanted.double()) < ERROR


@runs_kernels
@pytest.mark.parametrize("tokens", [2, 20])
def test_a_tokens_outputs_do_not_depend_on_its_place(tokens: int) -> None:
    layer, (x, routes) = Layer(Case("bfloat16")), inputs(tokens)
    whole = layer.fused(x, routes)
    turned = torch.arange(tokens - 1, -1, -1, device=DEVICE)
    moved = (part[turned].contiguous() for part in (routes.experts, routes.weights))
    found = layer.fused(x[turned], Routes(*moved))
    assert torch.equal(found, whole[turned])


@runs_kernels
def test_nan_does_not_reach_other_tokens() -> None:
    layer, (x, routes) = Layer(Case("rows", shared=2)), inputs(20)
    clean = layer.fused(x, routes, lambda: x)
    x[7] = float("nan")
    found = layer.fused(x, routes, lambda: x)
    others = torch.arange(20, device=DEVICE) != 7
    assert torch.equal(found[others], clean[others])


@runs_kernels
@pytest.mark.parametrize("latent", [0, 96, None], ids=["relu2", "latent", "gated"])
@torch.no_grad()
def test_a_layer_of_experts_gives_what_it_gives_in_torch(latent: int | None) -> None:
    """Router, routed and shared experts, which are part of the same launches without a latent
    width."""
    config = MoEConfig(EXPERTS, TOP_K, 72, 144, latent or 0, scaling=2.5)
    gated = latent is None
    exact = SigmoidMoE(config, SIZE) if gated else LatentMoE(config, SIZE, bias=False)
    random_weights(exact, 5)
    layer = copy.deepcopy(exact).to(DEVICE, DTYPE)
    layer.gate.e_score_correction_bias.data = torch.zeros(EXPERTS, device=DEVICE)
    exact.load_state_dict({name: part.float() for name, part in layer.state_dict().items()})
    prepare_for_inference(layer, TritonOps())
    assert layer.experts.fused is not None and (layer.experts.fused.shared == 2) == (not latent)
    for tokens in (1, 5):
        x = normal(tokens, SIZE, seed=8)
        wanted = exact(x.float().cpu())
        assert relative_error(layer(x), wanted.double()) < 2 * ERROR


@runs_kernels
@torch.no_grad()
def test_routed_and_shared_experts_take_what_a_norm_has_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not GPU:
        monkeypatch.setattr(hopper, "supports", lambda up, down: True)  # beyond 70 tokens
    layer = GatedSharedMoE(MoEConfig(EXPERTS, TOP_K, 128, 128), 256).to(DEVICE, DTYPE)
    random_weights(layer, 5)
    for owner in (layer.experts, *layer.shared_expert.children()):
        for name in owner.matrix_names:
            owner.hold(name, as_float8(getattr(owner, name).detach(), "blocks"))
    prepare_for_inference(layer, TritonOps())
    rounding = layer.input_rounding
    assert rounding is not None and rounding.kept and layer.rounded_from == fused.MAX_SHARED + 1
    x = normal(600 if GPU else 70, 256, seed=8)
    assert torch.equal(layer(TritonOps().round(x, rounding)), layer(x))


@runs_kernels
@pytest.mark.parametrize("gated", [False, True], ids=["relu2", "gated"])
@torch.no_grad()
def test_shared_experts_of_rows_with_adapters_are_adapted(gated: bool) -> None:
    """Other passes multiply them together with the routed ones."""
    config = MoEConfig(EXPERTS, TOP_K, 72, 144)
    layer = SigmoidMoE(config, SIZE) if gated else LatentMoE(config, SIZE, bias=False)
    random_weights(layer.to(DEVICE, DTYPE), 5)
    layer.gate.e_score_correction_bias.data = torch.zeros(EXPERTS, device=DEVICE)
    merged, down, up = copy.deepcopy(layer), normal(3, 144, seed=1), normal(SIZE, 3, seed=2)
    for each in (layer, merged):
        prepare_for_inference(each, TritonOps())
        assert each.experts.fused is not None and each.experts.fused.shared == 2
    merged.shared_experts.down_proj.weight += up @ down
    product = layer.shared_experts.down_proj
    slots = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    sizes = [AdapterSize(1, 3, 144, SIZE, 0)]
    product.additions = TritonOps().additions(sizes, DTYPE, DEVICE)
    product.additions.parts[0].put(0, down, up)
    x = normal(5, SIZE, seed=8)
    with reading(slots):
        found = layer(x)
    assert relative_error(found, merged(x).double().cpu()) < 2 * ERROR
    assert relative_error(layer(x), merged(x).double().cpu()) > 0.1, "the adapter matters"


@pytest.mark.gpu
def test_a_layer_takes_six_launches_and_nothing_waits() -> None:
    layer = Layer(Case("bfloat16", shared=2))
    weight, bias = normal(EXPERTS, SIZE, seed=7), torch.zeros(EXPERTS, device=DEVICE)
    for tokens, most in ((1, 5), (8, 6), (64, 6)):
        x, _ = inputs(tokens)

        def run(x: Tensor = x) -> Tensor:
            return layer.fused(x, route(x, weight, Choice(TOP_K, bias)), lambda: x)

        wanted, graph = run(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # refuses whatever waits
            found = run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
        assert torch.equal(found, wanted)
        cuda = torch.autograd.DeviceType.CUDA
        launches = [event.name for event in seen.events() if event.device_type == cuda]
        assert 0 < len(launches) <= most, launches
