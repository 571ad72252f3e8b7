"""Decode steps through several layers as one program: what it computes is what the layers would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runner_harness import PLAIN, TREE, Engine, Settings, greedy
from tiny_model import VOCAB, write_delta_model, write_folder, write_head, write_model
from torch import Tensor
from torch.testing import assert_close

from mamba_eagle.cpu import span_kernels, team
from mamba_eagle.cpu.programs.drafts import DraftProgram
from mamba_eagle.cpu.programs.layers import FusedLayers, FusedRun, SingleLayer
from mamba_eagle.models.granitemoehybrid import GraniteMoeHybridForCausalLM, parse_config
from mamba_eagle.models.loader import random_weights
from mamba_eagle.runner.steps.decode_step import DecodeStep

DOUBTING = Settings(topk=2, steps=4, nodes=7, p_min=0.001)
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.3,
    "num_local_experts": 0,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Nemotron-H with odd sizes, Granite, Qwen3.5 (delta rules, gated attention, rotation),
    Qwen3-Next (what belongs to a head side by side, experts), and Olmo-Hybrid: norms after
    attention and MLP, and of all heads."""
    room = tmp_path_factory.mktemp("fused")
    hybrid = write_model(room / "hybrid")
    granite = GraniteMoeHybridForCausalLM(parse_config(GRANITE))
    random_weights(granite, 3)
    found = {"hybrid": hybrid, "granite": write_folder(room / "granite", GRANITE, granite)}
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "head_dim": 32}
    found["delta"] = write_delta_model(room / "delta", **sizes)
    experts = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    experts |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}
    found["next"] = write_delta_model(room / "next", **sizes, **experts)
    sizes |= {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"}
    found["olmo"] = write_delta_model(room / "olmo", rope_theta=None, **sizes)
    for name, folder in found.items():
        write_head(room / f"{name}-head", folder)
    return found


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A team, whatever the machine, which shares out all that it can."""
    monkeypatch.setattr(span_kernels, "num_threads", lambda: 3)
    monkeypatch.setattr(team, "MIN_SHARED", 0)
    team.gather(3)
    yield
    team.gather(1)


def steps_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The trees of all steps of two requests, and their logits."""
    found: list[Tensor] = []
    kind = type(engine.runner.step)
    verify = kind.verify

    def kept(self: DecodeStep, *arguments: object) -> object:
        verified = verify(self, *arguments)
        found.extend(part.clone() for part in (*verified.tree, verified.logits))
        return verified

    with monkeypatch.context() as changed:
        changed.setattr(kind, "verify", kept)
        for length in (5, 19):
            prompt = [(7 * k + length) % VOCAB for k in range(length)]
            engine.generate(prompt, greedy(30))  # journals are folded
    return found


@pytest.mark.parametrize("name", ["hybrid", "granite", "delta", "next", "olmo"])
@pytest.mark.parametrize("mode", ["auto", "int8"])
def test_a_program_computes_what_the_layers_do(
    name: str, mode: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, trees, plain steps, and chains that end early; and the program that drafts."""
    folder = folders[name]
    kinds = [TREE, PLAIN]
    if (name, mode) == ("granite", "auto"):
        kinds.append(DOUBTING)  # the last one
    for settings in kinds:
        head = folder.parent / f"{name}-head" if settings is not PLAIN else None
        drafts = "int8" if settings is DOUBTING else mode
        given = {"quantization": mode, "speculative_draft_model_quantization": drafts}
        engine = Engine(folder, head, settings, **given)
        programs = steps_of(engine, monkeypatch)
        # 8 heads of 20 channels are no whole number of panels; experts run by themselves
        whole = (name, mode) != ("hybrid", "auto") and name != "next"
        step = engine.runner.step
        assert (step.program is not None) == whole
        if not whole:
            (parts,) = step.scheme._fused._made.values()
            assert {type(part) for part in parts} == {FusedRun, SingleLayer}
        with monkeypatch.context() as changed:
            changed.setattr(FusedLayers, "run", lambda *arguments: None)
            changed.setattr(step, "program", None)
            if head is not None:
                drafter = engine.runner.drafter
                assert isinstance(drafter.greedy.__self__, DraftProgram)
                changed.setattr(drafter, "greedy", None)
            layers = steps_of(engine, monkeypatch)
        assert len(programs) == len(layers) > 4
        assert all(torch.equal(one, other) for one, other in zip(programs, layers, strict=True))
    if settings is DOUBTING:
        output = engine.runner.drafter.network.output
        assert output is not None, "drafts have an lm_head of eight bits"
        exact, rounded = engine.runner.model.lm_head.matrix, output.matrix.dequantize()
        assert not exact.few_bits
        assert_close(rounded, exact.dequantize(), rtol=0, atol=float(rounded.abs().max()) / 127)
        assert len({logits.shape[1] for logits in programs[5::6]}) > 1


@pytest.mark.skipif(not team.can_sleep(), reason="there are no teams here")
def test_threads_change_no_bit_of_a_program(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, three_threads: None
) -> None:
    engine = Engine(folders["granite"], None, Settings("NONE"), quantization="int8")
    together = steps_of(engine, monkeypatch)
    team.gather(1)
    alone = steps_of(engine, monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
