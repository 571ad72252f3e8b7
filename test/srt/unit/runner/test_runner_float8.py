"""A runner with a float8 KV cache, and drafters of float8 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_harness import (
    PLAIN,
    TREE,
    Engine,
    Tiny,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from tiny_drafters import DRAFTERS
from torch import Tensor, nn

from mamba_eagle.drafting.model_drafter import ModelDrafter
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.weights import matrix_layers

PROMPTS = [random_prompt(length, length) for length in (3, 40)]


class RoundedKV(FullSequenceContext):
    """Keys and values are float8 numbers."""

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v))
        return super().attention(layer, q, k, v)


@torch.inference_mode()
def logprobs(tiny: Tiny, tokens: list[int], context: type[FullSequenceContext]) -> Tensor:
    model = tiny.plain.model
    hidden = model(torch.tensor(tokens[:-1]), context(1, len(tokens) - 1))
    rows = model.compute_logits(hidden).log_softmax(1)
    return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("settings", ["none", "tree", "tree-torch"])
def test_texts_are_those_of_rounded_keys_and_values(tiny: Tiny, settings: str) -> None:
    engine = tiny.engine(settings, kv_cache_dtype="fp8_e4m3")
    changed = 0.0
    for prompt in PROMPTS:
        live = engine.generate(prompt, greedy(20), return_logprob=True)
        found = torch.tensor([entry.logprob for entry in live.logprobs])
        first = live.prompt_len - 1 + len(live.output) - len(found)
        wanted = logprobs(tiny, live.tokens, RoundedKV)[first:]
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)
        unrounded = logprobs(tiny, live.tokens, FullSequenceContext)[first:]
        changed = max(changed, float((unrounded - wanted).abs().max()))
    assert changed > 2e-2, "rounding would show"
    assert "tree" not in settings or max(accepted([live])) > 1


def test_a_float8_cache_takes_a_byte_per_number(tiny: Tiny) -> None:
    small, large = (tiny.engine(TREE, kv_cache_dtype=name) for name in ("fp8_e4m3", "auto"))
    for one, other in zip(kv_pools(small.runner), kv_pools(large.runner), strict=True):
        assert one.num_layers and 4 * one.num_bytes == other.num_bytes
    plans = small.runner.memory, large.runner.memory
    assert 4 * plans[0].kv_slot_bytes == plans[1].kv_slot_bytes


def kv_pools(runner: object) -> list:
    drafter = runner.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, ModelDrafter)
    return [runner.kv, drafter.kv]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["eagle", "mtp", "standalone", "dspark"])
def test_drafters_are_float8_too(tiny: Tiny, name: str, tmp_path: Path) -> None:
    """And guess as well: float8 changes a draft now and then."""
    lengths = {}
    for mode, kv in (("auto", "auto"), ("fp8", "fp8_e4m3")):
        few = {"quantization": mode, "kv_cache_dtype": kv}
        engine = DRAFTERS[name].engine(tmp_path, tiny.model, TREE, **few)
        lives = [engine.generate(prompt, sampled(24, 3)) for prompt in PROMPTS]
        lengths[mode] = sum(accepted(lives)) / len(accepted(lives))
        layers = [layer for _, layer in matrix_layers(drafting_module(engine))]
        held = [m for layer in layers for m in layer.matrices.values() if m.few_bits]
        assert bool(held) == (mode == "fp8")
        assert (engine.runner.drafter.kv.k.dtype == torch.float8_e4m3fn) == (mode == "fp8")
    assert lengths["fp8"] > 0.8 * lengths["auto"] > 0.8


def drafting_module(engine: Engine) -> nn.Module:
    drafter = engine.runner.drafter
    network = getattr(drafter, "network", drafter)
    return network.head if hasattr(network, "head") else network.model


def test_a_cached_prefix_is_the_one_that_was_computed(tiny: Tiny) -> None:
    engine = tiny.engine(PLAIN, kv_cache_dtype="fp8_e4m3")
    prompt = random_prompt(33, 5)
    live = engine.start(prompt, greedy(12))
    engine.finish([live])
    kept = engine.release(live, fold_to=len(live.tokens) - 1)
    assert kept is not None
    again = engine.generate([*kept.tokens, 5, 7, 9], greedy(8), hit=kept)
    fresh = engine.generate([*kept.tokens, 5, 7, 9], greedy(8))
    assert again.output == fresh.output
