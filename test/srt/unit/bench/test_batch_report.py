"""What a decode step must read, worked out by hand, and how a batch's speed follows from it."""

from __future__ import annotations

import pytest

from mamba_eagle.bench.report import (
    FewBits,
    Speed,
    StateMemory,
    StepBytes,
    StepSize,
    step_bytes,
    weight_bytes,
)
from mamba_eagle.message import Ready
from mamba_eagle.models.registry import parse_config
from mamba_eagle.quantization.policy import Policy

HYBRID = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 100,
    "hidden_size": 32,
    "hybrid_override_pattern": "M*M-",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
EXPERTS = {
    **HYBRID,
    "hybrid_override_pattern": "ME",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}


def hybrid_weights(tokens: int) -> int:
    conv = 32 + 2 * 2 * 16
    mamba = (32 + conv + 4) * 32 + 32 * 32 + 5 * conv + 32  # projections, convolution, norm
    attention = (32 + 2 * 16) * 32 + 32 * 32
    mlp = 2 * 32 * 48
    norms = 5 * 32
    numbers = 2 * mamba + attention + mlp + norms + 100 * 32  # and the lm_head
    heads = 2 * 3 * 4  # A_log, dt_bias and D stay float32
    return 2 * (numbers + tokens * 32) + 4 * heads


def test_a_step_reads_weights_once_and_states_and_keys_of_each_request() -> None:
    model = parse_config(HYBRID)
    found = step_bytes(model, StepSize(batch=3, nodes=8, position=50.5), "bfloat16", "float32")
    assert found.weights == hybrid_weights(tokens=24)
    history = 3 * (32 + 2 * 2 * 16) * 2
    assert found.states == 3 * 2 * (4 * 8 * 16 * 4 + history)
    assert found.kv == 3 * 50.5 * 2 * 2 * 8 * 2
    assert found.total == found.weights + found.states + found.kv


def test_matrices_of_few_bits_are_a_byte_per_number() -> None:
    model = parse_config(HYBRID)
    dense = weight_bytes(model, "bfloat16", tokens=5)
    projections = 2 * ((32 + 32 + 2 * 2 * 16 + 4) * 32 + 32 * 32) + (32 + 2 * 16) * 32 + 32 * 32
    matrices = projections + 2 * 32 * 48
    assert weight_bytes(model, "bfloat16", 5, Policy("fp8")) == dense - matrices
    assert weight_bytes(model, "bfloat16", 5, Policy("fp8", True)) == dense - matrices - 100 * 32
    size, few = StepSize(batch=3, nodes=8, position=50.5), FewBits(kv_cache_dtype="fp8_e4m3")
    large, small = (step_bytes(model, size, "bfloat16", "float32", x) for x in (FewBits(), few))
    assert 2 * small.kv == large.kv and small.weights == large.weights


def test_an_embedding_that_is_the_lm_head_is_read_whole() -> None:
    untied = weight_bytes(parse_config(HYBRID), "bfloat16", tokens=5)
    tied = parse_config({**HYBRID, "tie_word_embeddings": True})
    assert weight_bytes(tied, "bfloat16", tokens=5) == untied - 5 * 32 * 2


def test_of_experts_only_those_are_read_that_tokens_go_to() -> None:
    model = parse_config(EXPERTS)
    one, three, many, more = (weight_bytes(model, "bfloat16", tokens) for tokens in (1, 3, 60, 61))
    row, expert = 2 * 32, 2 * 2 * 32 * 24
    reached = 8 * (1 - 0.75**3)  # by three tokens that choose 2 of 8 each
    assert three - one == pytest.approx((reached - 2) * expert + 2 * row)
    assert more - many == pytest.approx(row, rel=1e-4), "all experts were read before"
    counted = weight_bytes(model, "bfloat16", 3, touched=4.0)
    assert three - counted == pytest.approx((reached - 4) * expert)


def test_speed_follows_from_the_time_of_a_step() -> None:
    least = StepBytes(weights=2e9, states=0.5e9, kv=0.5e9)
    speed = Speed(nodes=8, seconds=0.002, tokens=12, least=least, copy_tb_s=3.0)
    assert speed.tokens_per_second == 6000
    assert speed.gb_per_second == pytest.approx(1500)
    assert speed.share == pytest.approx(0.5)
    assert speed.line() == (
        "Step.    tree of 8 nodes: 2.000 ms, 6000.0 token/s, 1500.0 GB/s "
        "(weights 2.00 + states 0.50 + kv 0.50 GB), 50% of the GPU's copy rate of 3.00 TB/s"
    )


def test_a_cpu_has_no_share_of_a_limit() -> None:
    speed = Speed(1, 0.01, 1, StepBytes(1e9, 0, 0), copy_tb_s=None)
    assert speed.share is None
    assert speed.line() == (
        "Step.    plain: 10.000 ms, 100.0 token/s, 100.0 GB/s (weights 1.00 + states 0.00 + "
        "kv 0.00 GB)"
    )


@pytest.mark.parametrize("device, slots", [("cpu", 4), ("cuda", 5)])
def test_state_memory_is_that_of_one_of_the_slots_there_are(device: str, slots: int) -> None:
    ready = Ready(
        max_kv_slots=100,
        max_state_slots=4,
        max_running_requests=4,
        context_length=100,
        vocab_size=100,
        eos_token_ids=[],
        details={"device": device, "checkpoint_bytes": slots * 10**6, "verify_bytes": slots * 500},
    )
    state = StateMemory.of(ready)
    assert (state.checkpoint, state.beside) == (1e6, 500) and state.megabytes == 1.0005
