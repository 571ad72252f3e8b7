"""Mamba2's recurrence: its definition, and the same bits however a token is served."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from forms import DEVICE, GPU
from tensor_checks import Draw, relative_error
from torch import Tensor
from verify_rig import mamba_config

pytest.importorskip("triton")

from gluon_rig import exp2, interpreted
from recurrence_rig import GARBAGE, Glue, Rule, Server, Span, assert_definitions_bits, of_spans
from triton_rig import NANO

from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence import gluon_fold, gluon_prompts, gluon_verify, naive
from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes, TreeLayout

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]
NARROW = Sizes(8, 64, 2, 64)
WIDE = Sizes(4, 128, 1, 256)
TINY = Sizes(2, 16, 1, 16)

if not GPU:
    names = ("gluon_fold", "gluon_prompts", "gluon_verify")
    gluon_fold, gluon_prompts, gluon_verify = interpreted(*(f"recurrence.{name}" for name in names))


class Tokens(NamedTuple):
    """What the tokens of b sequences feed into a layer."""

    x: Tensor  # [b, l, H*P]
    B: Tensor  # [b, l, G*N]
    C: Tensor  # [b, l, G*N]
    dt: Tensor  # [b, l, H] float32
    A: Tensor  # [H]
    D: Tensor  # [H]
    state: Tensor  # [b, H, P, N], before them


def random_tokens(sizes: Sizes, batch: int, length: int, dtype: torch.dtype, seed: int) -> Tokens:
    draw, (H, P, G, N) = Draw(seed), sizes
    parts = Tokens(
        draw.normal(batch, length, H * P).to(dtype),
        draw.normal(batch, length, G * N).to(dtype),
        draw.normal(batch, length, G * N).to(dtype),
        draw.steps(batch, length, H, largest=0.3),
        draw.decay_rates(H),
        draw.normal(H),
        draw.normal(batch, H, P, N),
    )
    return Tokens(*(part.to(DEVICE) for part in parts))


def defined(tokens: Tokens, sizes: Sizes, sequence: int) -> naive.Recurrence:
    H, P, G, N = sizes
    x, B, C = (part[sequence] for part in tokens[:3])
    x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    at = (tokens.dt[sequence], tokens.A, B, C, tokens.D, tokens.state[sequence])
    return naive.recurrence(x, *at)


class Mamba2(Rule):
    def __init__(self, tokens: Tokens, sizes: Sizes) -> None:
        self.tokens, self.sizes, self.state = tokens, sizes, tokens.state
        self.length = tokens.dt.shape[1]

    def prompts(
        self, spans: list[Span], state: Tensor, plan: PrefillPlan, tiles: Tiles | None
    ) -> Tensor:
        (H, P, G, N), n = self.sizes, plan.tokens
        parts = torch.cat([of_spans(part, spans) for part in self.tokens[:3]], dim=1)
        x, B, C = parts.split([H * P, G * N, G * N], dim=1)
        x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
        dt = of_spans(self.tokens.dt, spans).t()
        dt = torch.empty(H, -(-n // 16) * 16, device=DEVICE)[:, :n].copy_(dt).t()
        A, D = self.tokens.A, self.tokens.D
        return gluon_prompts.scan(x, dt, A, B, C, D, state, plan, tiles)

    def make_rows(self, W: int) -> None:
        (H, P, G, N), b, dtype = self.sizes, self.batch, self.tokens.x.dtype
        xB = torch.full((b, W, H * P + G * N), GARBAGE, dtype=dtype, device=DEVICE)
        dt = torch.full((b, W, H), GARBAGE, device=DEVICE)
        self.rows = RowBuffers(xB, dt, dt * float("nan"))

    def verify(self, source: Any, layout: TreeLayout, state: Tensor, tiles: Tiles | None) -> Tensor:
        tokens, at = self.tokens, (layout.slots[:, None], layout.rows)
        self.rows.xB[at] = torch.cat([tokens.x[source], tokens.B[source]], dim=2)
        self.rows.dt[at] = tokens.dt[source]
        given = (tokens.C[source].contiguous(), tokens.A, tokens.D, state, layout)
        return gluon_verify.tree_verify(self.rows, *given, self.sizes, tiles)

    def fold(self, folds: Folds, state: Tensor) -> None:
        rows = RowBuffers(*(part[None] for part in self.rows))
        gluon_fold.fold_journals(rows, self.tokens.A[None], state[None], folds, self.sizes)


def test_the_definition_is_the_recurrence() -> None:
    sizes = Sizes(4, 6, 2, 128)
    tokens = random_tokens(sizes, 1, 30, torch.float32, 0)
    found = defined(tokens, sizes, 0)
    H, P, G, N = sizes
    x, B, C = (part[0] for part in tokens[:3])
    x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    at = (tokens.dt[0], tokens.A, B, C, tokens.D, tokens.state[0])
    wanted = recurrence_oracle(x, *at)
    assert relative_error(found.y, wanted.y) < 1e-6
    assert relative_error(found.states, wanted.states) < 1e-6


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFINED = [
    *(pytest.param(s, d, marks=on_a_gpu) for s in (NANO, NARROW, WIDE) for d in DTYPES),
    (TINY, torch.bfloat16),
    (Sizes(1, 80, 1, 128), torch.float32),
]


@pytest.mark.parametrize("sizes, dtype", DEFINED, ids=str)
def test_a_prompt_has_the_definitions_bits(
    sizes: Sizes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:
        monkeypatch.setattr(torch, "exp2", exp2)
    tokens = random_tokens(sizes, 1, 21, dtype, 0)
    wanted = defined(tokens, sizes, 0)
    assert_definitions_bits(Mamba2(tokens, sizes), wanted.y, wanted.states)


SERVED = [
    pytest.param(Sizes(2, 16, 1, 16), 2, 9, torch.bfloat16, id="tiny"),
    pytest.param(NANO, 3, 16, torch.bfloat16, id="nano", marks=on_a_gpu),
    pytest.param(NANO, 1, 1, torch.bfloat16, id="nano-decode", marks=on_a_gpu),
    pytest.param(NARROW, 5, 8, torch.float16, id="narrow-float16", marks=on_a_gpu),
    pytest.param(WIDE, 2, 16, torch.float32, id="wide-float32", marks=on_a_gpu),
    pytest.param(NARROW, 2, 64, torch.bfloat16, id="64-nodes", marks=on_a_gpu),
]


@pytest.mark.parametrize("seed", range(2 if GPU else 1))
@pytest.mark.parametrize("sizes, batch, nodes, dtype", SERVED)
def test_bits_do_not_depend_on_how_a_token_was_served(
    sizes: Sizes, batch: int, nodes: int, dtype: torch.dtype, seed: int
) -> None:
    """Prompts in chunks, chains, trees, folds; any batch and tile."""
    tokens = random_tokens(sizes, batch, (80 if GPU else 24) + nodes, dtype, seed)
    Server(Mamba2(tokens, sizes), nodes, seed).run()


@pytest.mark.gpu
@on_a_gpu[1]
def test_prompts_trees_and_journals_agree_from_raw_inputs() -> None:
    Glue(mamba_config(num_heads=4, head_dim=32, state_size=64), 120).run()
