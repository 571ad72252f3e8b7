"""Norms that overwrite their inputs, and gates: their place in the layers, on a GPU their results.
Without a GPU a stand-in does in torch what kernels do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.ops import TORCH, LayerOps, Normed
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.registry import model_class, parse_config

NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 96,
    "hidden_size": 64,
    "hybrid_override_pattern": "M-*-",
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "chunk_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 112,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


class StandIn(TritonOps):
    """In torch; overwrites what Triton's norms overwrite, and records what was called."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def rms_norm(self, x: Tensor, *given: Any) -> Tensor:
        self.names.append("rms_norm")
        return TORCH.rms_norm(x, *given)

    def add_rms_norm(self, stream: Tensor, added: Tensor, *given: Any) -> Normed:
        self.names.append("add_rms_norm")
        stream += added
        return Normed(added.copy_(TORCH.rms_norm(stream, *given)), stream)

    def silu_and_mul(self, both: Tensor, *given: Any) -> Tensor:
        self.names.append("silu_and_mul")
        return LayerOps.silu_and_mul(self, both, *given)

    relu_squared = LayerOps.relu_squared
    gated_group_rms_norm = LayerOps.gated_group_rms_norm
    rotate = LayerOps.rotate
    place_heads = LayerOps.place_heads


@pytest.mark.parametrize("tapped", [(), (1, 3)], ids=["plain", "tapped"])
@pytest.mark.parametrize("values", [NEMOTRON, LLAMA], ids=["nemotron", "llama"])
def test_models_give_the_same(values: dict[str, Any], tapped: tuple[int, ...]) -> None:
    config, calls = parse_config(values), list[str]()
    tokens = torch.arange(20) * 7 % 96

    def features(prepared: bool) -> Tensor:
        model = model_class(config)(config)
        random_weights(model, 0)
        if tapped:
            model.tap(tapped)
        if prepared:
            prepare_for_inference(model, StandIn(calls))
        with torch.no_grad():
            return model(tokens, FullSequenceContext(1, len(tokens)))

    plain = features(prepared=False)
    assert not calls
    torch.testing.assert_close(features(prepared=True), plain, rtol=1e-4, atol=1e-5)
    norms = calls.count("rms_norm") + calls.count("add_rms_norm")
    layers = 4 if values is NEMOTRON else 2 * 3
    assert norms == layers + 1
    if values is NEMOTRON and not tapped:
        assert calls.count("add_rms_norm") == layers - 1
    if values is LLAMA:
        assert calls.count("silu_and_mul") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_give_what_torch_gives(dtype: torch.dtype) -> None:
    ops = TritonOps()
    torch.manual_seed(0)
    for n, size in ((1, 4480), (37, 2688), (512, 128)):
        x, added = (torch.randn(n, size, device="cuda").to(dtype) for _ in range(2))
        weight = torch.rand(size, device="cuda").to(dtype) + 0.5
        assert_close(ops.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
        wanted = TORCH.add_rms_norm(x, added, weight, 1e-5)
        found = ops.add_rms_norm(x.clone(), added.clone(), weight, 1e-5)
        assert_close(found.normed, wanted.normed)
        assert_close(found.stream, wanted.stream)
        gate = torch.randn(n, size, device="cuda").to(dtype)
        gated = (x, gate, weight, size // 8, 1e-5)
        assert_close(ops.gated_group_rms_norm(*gated), TORCH.gated_group_rms_norm(*gated))
        assert_close(ops.relu_squared(x.clone()), TORCH.relu_squared(x))
        heads = torch.randn(n, 24, 128, device="cuda").to(dtype)[:, 3:19]  # of a fused product
        angles = torch.rand(n, 1, 48, device="cuda") * 100
        turned = TORCH.rotate(heads, angles.cos(), angles.sin())
        assert_close(ops.rotate(heads, angles.cos(), angles.sin()), turned)
        both = torch.randn(n, 2 * size, device="cuda").to(dtype)
        assert_close(ops.silu_and_mul(both), TORCH.silu_and_mul(both))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < 6e-3, "one or two roundings apart"
