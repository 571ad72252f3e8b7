"""Gated DeltaNet's recurrence: its definition, and the same bits however a token is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from forms import DEVICE, GPU
from tensor_checks import Draw, relative_error
from torch import Tensor
from verify_rig import delta_config

pytest.importorskip("triton")

from gluon_rig import exp2, interpreted
from recurrence_rig import GARBAGE, Glue, Rule, Server, Span, assert_definitions_bits, of_spans

from mamba_eagle.backend.triton.exact_backend import ExactBackend
from mamba_eagle.backend.triton.exact_delta import exact_delta_supported
from mamba_eagle.kernels.delta_recurrence import gluon_prompts, gluon_verify, naive
from mamba_eagle.kernels.delta_rule import naive as rule
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence import gluon_fold
from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.tree_verify.layout import Folds, Sizes, TreeLayout
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.parallel.shard import Shard, local

MODELS = Path(__file__).parents[3] / "benchmark/models"
EPS = 1e-6
TINY, NARROW = Sizes(4, 16, 2, 16), Sizes(6, 48, 2, 64)
QWEN_27B, QWEN_35B = Sizes(48, 128, 16, 128), Sizes(32, 128, 16, 128)
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]

if not GPU:
    names = ("delta_recurrence.gluon_prompts", "delta_recurrence.gluon_verify")
    gluon_prompts, gluon_verify, gluon_fold = interpreted(*names, "recurrence.gluon_fold")
    gluon_verify.JOURNAL = 4  # so that journals are longer


class Tokens(NamedTuple):
    """What the tokens of b sequences feed into a layer."""

    convolved: Tensor  # [b, l, 2*G*N + H*P]
    gates: Tensor  # [b, l, 2*H] float32
    state: Tensor  # [b, H, P, N], before them


def random_tokens(sizes: Sizes, batch: int, length: int, dtype: torch.dtype, seed: int) -> Tokens:
    draw, (H, P, G, N) = Draw(seed), sizes
    g = -F.softplus(draw.normal(batch, length, H)) * draw.steps(H, largest=1.0)
    parts = Tokens(
        draw.normal(batch, length, 2 * G * N + H * P).to(dtype),
        torch.cat([g, draw.normal(batch, length, H).sigmoid()], dim=2),
        draw.normal(batch, H, P, N),
    )
    return Tokens(*(part.to(DEVICE) for part in parts))


class Parts(NamedTuple):
    q: Tensor  # [l, G, N]
    k: Tensor  # [l, G, N]
    v: Tensor  # [l, H, P]
    g: Tensor  # [l, H]
    beta: Tensor  # [l, H]


def parts_of(tokens: Tokens, sizes: Sizes) -> Parts:
    """Of the first sequence."""
    H, P, G, N = sizes
    q, k, v = tokens.convolved[0].split([G * N, G * N, H * P], dim=1)
    q, k, v = q.unflatten(1, (G, N)), k.unflatten(1, (G, N)), v.unflatten(1, (H, P))
    return Parts(q, k, v, *tokens.gates[0].split(H, dim=1))


class DeltaNet(Rule):
    def __init__(self, tokens: Tokens, sizes: Sizes) -> None:
        self.tokens, self.sizes, self.state = tokens, sizes, tokens.state
        self.length = tokens.gates.shape[1]

    def prompts(
        self, spans: list[Span], state: Tensor, plan: PrefillPlan, tiles: Tiles | None
    ) -> Tensor:
        convolved, gates = (of_spans(part, spans) for part in self.tokens[:2])
        return gluon_prompts.scan(convolved, gates, state, plan, self.sizes, EPS, tiles)

    def make_rows(self, W: int) -> None:
        (H, P, G, N), b, dtype = self.sizes, self.batch, self.tokens.convolved.dtype
        self.rows = DeltaRows(
            torch.full((b, W, 2 * H), GARBAGE, device=DEVICE),
            torch.full((b, W, G * N), GARBAGE, dtype=dtype, device=DEVICE),
            torch.full((b, W, H * P), GARBAGE, device=DEVICE),
        )

    def verify(self, source: Any, layout: TreeLayout, state: Tensor, tiles: Tiles | None) -> Tensor:
        convolved, gates = (part[source].contiguous() for part in self.tokens[:2])
        given = (gates.flatten(0, 1), convolved, state, layout, self.sizes, EPS, tiles)
        return gluon_verify.tree_verify(self.rows, *given)

    def fold(self, folds: Folds, state: Tensor) -> None:
        rows = DeltaRows(*(part[None] for part in self.rows))
        gluon_fold.fold_journals(rows, None, state[None], folds, self.sizes)


def test_the_definition_is_the_recurrence() -> None:
    sizes = Sizes(4, 6, 2, 128)
    tokens = random_tokens(sizes, 1, 30, torch.float32, 0)
    q, k, v, g, beta = parts_of(tokens, sizes)
    found = naive.recurrence(q, k, v, g, beta, tokens.state[0], EPS)
    q, k = (part.double().repeat_interleave(2, 1) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + EPS).sqrt() for part in (q, k))
    given = rule.gated_delta(q * 128**-0.5, k, v, g, beta)
    wanted = rule.chain(given, tokens.state[0])
    assert relative_error(found.o, torch.stack([node.o for node in wanted])) < 1e-6
    assert relative_error(found.states, torch.stack([node.state for node in wanted])) < 1e-6


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        (TINY, torch.bfloat16),
        (NARROW, torch.float32),
        *(
            pytest.param(sizes, dtype, marks=on_a_gpu)
            for sizes in (QWEN_27B, QWEN_35B, NARROW)
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
    ids=str,
)
def test_a_prompt_has_the_definitions_bits(
    sizes: Sizes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:
        monkeypatch.setattr(torch, "exp2", exp2)
    tokens = random_tokens(sizes, 1, 21, dtype, 0)
    wanted = naive.recurrence(*parts_of(tokens, sizes), tokens.state[0], EPS)
    assert_definitions_bits(DeltaNet(tokens, sizes), wanted.o, wanted.states)


SERVED = [
    pytest.param(TINY, 2, 9, torch.bfloat16, id="tiny"),
    pytest.param(QWEN_27B, 3, 16, torch.bfloat16, id="27b", marks=on_a_gpu),
    pytest.param(QWEN_35B, 5, 8, torch.bfloat16, id="35b", marks=on_a_gpu),
    pytest.param(QWEN_27B, 1, 1, torch.bfloat16, id="decode", marks=on_a_gpu),
    pytest.param(NARROW, 2, 64, torch.float16, id="64-nodes", marks=on_a_gpu),
]


@pytest.mark.parametrize("seed", range(2 if GPU else 1))
@pytest.mark.parametrize("sizes, batch, nodes, dtype", SERVED)
def test_bits_do_not_depend_on_how_a_token_was_served(
    sizes: Sizes, batch: int, nodes: int, dtype: torch.dtype, seed: int
) -> None:
    """Prompts in chunks, chains, trees, folds; any batch and tile."""
    tokens = random_tokens(sizes, batch, (80 if GPU else 12) + nodes, dtype, seed)
    Server(DeltaNet(tokens, sizes), nodes, seed).run()


def test_what_exact_bits_cannot_be_had_of_is_refused() -> None:
    config = delta_config(head_dim=128, state_size=128)
    assert exact_delta_supported(config)
    for change in ({"channel_decay": True}, {"state_size": 256}, {"head_dim": 72}):
        assert not exact_delta_supported(replace(config, **change))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.6-35b-a3b"])
def test_published_models_are_served(name: str, ranks: int) -> None:
    """By each of several ranks as well."""
    model, backend = read_model_config(MODELS / name), object.__new__(ExactBackend)
    assert backend.inexact(local(model, Shard(0, ranks))) == []


@pytest.mark.gpu
@on_a_gpu[1]
def test_prompts_trees_and_journals_agree_from_raw_inputs() -> None:
    Glue(delta_config(head_dim=32, state_size=64), 120).run()
