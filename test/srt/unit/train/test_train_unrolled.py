"""Unrolled training computes what a drafter computes, at all positions at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.block import Block
from mamba_eagle.layers.context import ForwardContext, FullSequenceContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.rotary import Rotary
from mamba_eagle.model_config import AttentionConfig, Mamba2Config, ModelConfig, RopeConfig
from mamba_eagle.train.heads.base import initialize
from mamba_eagle.train.heads.unrolled import UnrolledContext, shift

SIZE, LENGTH, STEPS = 32, 14, 4
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=12)
ROPE = RopeConfig(dim=8, theta=50.0)
MAMBA = Mamba2Config(4, 12, 8, 2, 4, True, (0.0, float("inf")), chunk_size=5)


def block(kind: str) -> Block:
    config = ModelConfig(
        "EagleHead", "", 9, SIZE, (kind,), 1e-5, MAMBA, ATTENTION, 48, LENGTH, (), raw={}
    )
    return Block(config, 0)


def rotary_block(kind: str) -> Block:
    made = block("attention")
    made.mixer = Attention(replace(ATTENTION, rope=ROPE), SIZE, 0, 1e-5)
    return made


class Stack(Layer):
    """A head in small: entries [n, SIZE] -> outputs [n, SIZE], with RoPE for who wants it."""

    def __init__(self, layers: list[Block]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.rotary = Rotary(ROPE)

    def forward(self, entries: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        ctx.rotation = self.rotary(ctx.positions, entries.device)
        for layer in self.layers:
            entries = layer(entries, ctx)
        return entries


@pytest.mark.parametrize(
    "kinds",
    [("attention",), ("mamba",), ("rope",), ("mamba", "attention"), ("mlp", "mamba", "rope")],
    ids="-".join,
)
def test_unrolled_step_equals_drafting_one_token_at_a_time(kinds: tuple[str, ...]) -> None:
    """Step j at position p is what a drafter computes j guesses after the last true entry, from a
    pass over that draft's whole history."""
    made = [rotary_block(kind) if kind == "rope" else block(kind) for kind in kinds]
    stack = Stack(made)
    initialize(stack, seed=0)
    for layer in stack.modules():
        if isinstance(layer, Attention):  # scores that tell the entries apart
            layer.q_proj.weight.data.mul_(3.0)
    generator = torch.Generator().manual_seed(1)
    tokens, features = torch.randn(2, 2, LENGTH, SIZE, generator=generator)  # [batch, length, size]
    with torch.no_grad():
        context = UnrolledContext(2, LENGTH)
        given, unrolled = features, []
        for _ in range(STEPS):
            given = stack((tokens + shift(given, 1)).flatten(0, 1), context)
            given = given.unflatten(0, (2, LENGTH))
            unrolled.append(given)
        for row in range(2):
            for root in range(LENGTH - STEPS):
                history = tokens[row, : root + 1] + shift(features, 1)[row, : root + 1]
                for j in range(STEPS):
                    out = stack(history, FullSequenceContext(1, len(history)))[-1]
                    torch.testing.assert_close(unrolled[j][row, root + j], out, atol=1e-5, rtol=0)
                    history = torch.cat([history, (tokens[row, root + j + 1] + out)[None]])


def test_gradients_of_unrolled_steps_are_those_of_numbers() -> None:
    """The recurrence's state is never built in a step, so its gradient is checked by itself."""
    stack = Stack([block("mamba")]).double()
    initialize(stack, seed=0)
    entries = torch.randn(
        1, 7, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    entries.requires_grad_()

    def last(entries: torch.Tensor) -> torch.Tensor:
        context, given = UnrolledContext(1, 7), entries
        for _ in range(3):
            given = stack((entries + shift(given, 1)).flatten(0, 1), context).view_as(entries)
        return given[0, 4:].sum()

    last(entries).backward()
    assert entries.grad is not None
    step = 1e-2
    for place in ((0, 0, 3), (0, 2, 5), (0, 4, 0), (0, 6, 9)):
        moved = torch.zeros_like(entries)
        moved[place] = step
        with torch.no_grad():
            slope = (last(entries + moved) - last(entries - moved)) / (2 * step)
        assert float(entries.grad[place]) == pytest.approx(float(slope), rel=2e-3, abs=1e-3)


def test_shift_moves_and_fills_with_zeros() -> None:
    x = torch.arange(1.0, 5.0)[None, :, None]
    assert shift(x, 1).flatten().tolist() == [0, 1, 2, 3]
    assert shift(x, -3).flatten().tolist() == [4, 0, 0, 0]
    assert shift(x, 9).flatten().tolist() == shift(x, -9).flatten().tolist() == [0] * 4
