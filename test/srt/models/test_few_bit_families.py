"""Models of few bits in every published layout and of every family: against float32 runs of the
dequantized weights with the same scales of activations, and with and without speculation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from peer_models import VOCAB, make_peer
from published import (
    BLOCK,
    FORMS,
    GROUP,
    dequantized_nvfp4,
    static_scale,
    write_published,
)
from runner_harness import Engine, Settings, greedy
from safetensors.torch import load_file, save_file
from test_loading import TOKENS, edit, logits
from test_parity import write_head
from tiny_model import load_model
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.moe import Experts
from mamba_eagle.layers.weights import matrix_layers, weight_bytes
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.quantization.layouts import layout_of

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = Settings("NONE")
TREE = Settings(topk=3, steps=3, nodes=8)


class Case(NamedTuple):
    family: str
    form: str  # of FORMS, or online


CASES = {
    "nemotron-h": "modelopt-fp8",
    "nemotron-h-bias": "online",
    "nemotron-3-super": "modelopt-fp8",
    "nemotron-3-nano": "online",
    "mamba2": "compressed-token",
    "bamba": "fp8-block",
    "granite": "online",
    "falcon-h1": "modelopt-fp8",
    "zamba2-adapters-rope": "compressed-static",
    "llama": "fp8-block",
    "qwen3": "online",
    "qwen3-next": "fp8-block",
    "qwen3.5": "modelopt-fp8",
    "qwen3.5-moe": "online",
}
STATIC = ("modelopt-fp8", "compressed-static")


@pytest.fixture(scope="module", params=CASES.items(), ids=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    case, folder = Case(*request.param), tmp_path_factory.mktemp("model")
    if case.form == "online":
        torch.manual_seed(0)
        make_peer(case.family).save_pretrained(folder)
    else:
        write_published(folder, case.family, case.form)
    return case, folder


def engine(folder: Path, settings: Settings = PLAIN, **others: object) -> Engine:
    head = None
    if settings.algorithm != "NONE":
        head = folder / "head"
        if not head.exists():
            write_head(head)
    return Engine(folder, head, settings, quantization="fp8", **others)


# ── the oracle ──


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def as_rounded(x: Tensor, module: str, form: str) -> Tensor:
    """What float8 makes of the inputs of a module."""
    if form in STATIC:
        return e4m3(x / static_scale(module)) * static_scale(module)
    if form == "fp8-block":
        parts = x.split(BLOCK, dim=-1)
        return torch.cat([as_rounded(part, module, "token") for part in parts], dim=-1)
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10)
    return e4m3(x / scale) * scale


def exact_model(case: Case, folder: Path, held: dict[str, set[str]]) -> CausalLM:
    """The dequantized weights in float32, with the inputs of the layers in ``held`` rounded."""
    model = load_model(folder)
    for name, layer in matrix_layers(model):
        for leaf in held.get(name, ()):
            if case.form == "online":
                weight = getattr(layer, leaf)
                scale = weight.abs().amax(-1, keepdim=True) / 448
                weight.copy_(e4m3(weight / scale) * scale)
        if isinstance(layer, Experts):
            patch_experts(layer, name, case.form, held.get(name, set()))
        elif name in held:
            patch_linear(layer, name, case.form)
    return model


def patch_linear(layer: Linear, name: str, form: str) -> None:
    def forward(x: Tensor) -> Tensor:
        return F.linear(as_rounded(x, name, form), layer.weight, layer.bias)

    layer.forward = forward  # type: ignore[method-assign]


def patch_experts(layer: Experts, name: str, form: str, leaves: set[str]) -> None:
    grouped = layer._grouped

    def rounding(leaf: str, x: Tensor, ends: Tensor) -> Tensor:
        given = as_rounded(x, f"{name}.{leaf}", form) if leaf in leaves else x
        return grouped(leaf, given, ends)

    layer._grouped = rounding  # type: ignore[method-assign]


def held_matrices(model: CausalLM) -> dict[str, set[str]]:
    """The layers that hold matrices of few bits; parts of fused ones as well."""
    held = {
        name: {leaf for leaf, matrix in layer.matrices.items() if matrix.few_bits}
        for name, layer in matrix_layers(model)
    }
    return {name: leaves for name, leaves in held.items() if leaves}


# ── tests ──


@torch.inference_mode()
def test_logits_are_those_of_the_dequantized_weights_and_rounded_inputs(case: tuple) -> None:
    case, folder = case
    model = engine(folder).runner.model
    held = held_matrices(model)
    assert len(held) >= len(model.parts.layers), "what the model multiplies has few bits"
    found = logits(model)
    exact = logits(exact_model(case, folder, held))
    unrounded = logits(load_model(folder))
    error = (found - exact).norm() / exact.norm()
    # a sum that is off by 1e-7 may round to the next float8 number: a few inputs differ by 1/16
    assert error < 0.2 * (unrounded - exact).norm() / exact.norm()
    assert error < 0.02


def test_texts_with_and_without_speculation_part_only_at_near_ties(case: tuple) -> None:
    """Other numbers of rows sum in another order, and float8 makes a step of what falls to the
    other side of a tie: each token is within 0.25 of the best one, given those before it."""
    case, folder = case
    prompt = [(7 * k) % VOCAB for k in range(37)]
    made = [engine(folder, settings) for settings in (PLAIN, TREE)]
    with torch.inference_mode():
        exact = exact_model(case, folder, held_matrices(made[0].runner.model))
        for one in made:
            live = one.generate(prompt, greedy(16))
            context = FullSequenceContext(1, len(live.tokens) - 1)
            rows = exact.compute_logits(exact(torch.tensor(live.tokens[:-1]), context))
            rows = rows[live.prompt_len - 1 :]
            chosen = rows.gather(1, torch.tensor(live.output)[:, None])[:, 0]
            assert (rows.max(1).values - chosen).max() < 0.25


def test_weights_take_the_memory_of_their_bits(case: tuple) -> None:
    """Beside embedding, lm_head and small tensors."""
    _, folder = case
    model = engine(folder).runner.model
    dense = weight_bytes(load_model(folder))
    every = [m for _, layer in matrix_layers(model) for m in layer.matrices.values()]
    held = [matrix for matrix in every if matrix.few_bits]
    saved = 3 * sum(math.prod(matrix.shape) for matrix in held)
    assert dense - saved < weight_bytes(model) < dense - 0.8 * saved


FOUR_BITS = ("modelopt-nvfp4", "compressed-nvfp4", "awq", "gptq", "gptq-v2")


@pytest.mark.parametrize("form", FOUR_BITS)
def test_four_bits_are_read_as_published(form: str, tmp_path: Path) -> None:
    """Each weight is within half a step of what was written; a wrong order, zero point or scale
    would be off by whole steps."""
    original = write_published(tmp_path, "nemotron-h", form)
    assert len(original) >= 4
    found = dict(load_model(tmp_path).named_parameters())
    for name, wanted in original.items():
        got = found[f"{name}.weight"]
        groups = wanted.unflatten(1, (-1, GROUP))
        if "nvfp4" in form:  # 4 and 6 are neighbours
            step = 2 * groups.abs().amax(-1) / 6
        else:
            step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
        off = (got - wanted).abs().unflatten(1, (-1, GROUP)).amax(-1)
        assert (off <= 0.6 * step + 1e-3).all(), name
        assert off.max() > 0


PACKED = {  # sizes of which four-bit groups are whole
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5-moe"])
def test_nvfp4_experts_and_delta_layers_have_the_logits_of_their_dequantized_weights(
    family: str, tmp_path: Path
) -> None:
    modules = write_published(tmp_path, family, "modelopt-nvfp4", **PACKED)
    assert sum(".experts." in name for name in modules) >= 3 * 3 * 8
    assert sum("linear_attn.in_proj_qkv" in name for name in modules) == 3
    found = logits(load_model(tmp_path))
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for name in modules:
        parts = ("weight", "weight_scale", "weight_scale_2")
        weight, scale, whole = (stored.pop(f"{name}.{part}") for part in parts)
        del stored[f"{name}.input_scale"]
        stored[f"{name}.weight"] = dequantized_nvfp4(weight, scale, whole)
    save_file(stored, path)
    edit(tmp_path, quantization_config=None)
    expected = logits(load_model(tmp_path))
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < 1e-4


def test_desc_act_and_missing_parts_are_refused_by_name(tmp_path: Path) -> None:
    first, second, *_ = write_published(tmp_path, "nemotron-h", "gptq")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored[f"{first}.g_idx"] = stored[f"{first}.g_idx"].flip(0)
    del stored[f"{second}.qzeros"]
    save_file(stored, path)
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path)
    text = str(refused.value)
    assert f"{first}.g_idx puts columns into groups out of order (desc_act)" in text
    assert f"scale of {second}.weight: there is no {second}.qzeros" in text


# ── what is chosen ──


def test_a_checkpoint_is_dequantized_where_the_device_multiplies_no_float8(tmp_path: Path) -> None:
    write_published(tmp_path, "nemotron-h", "modelopt-fp8")
    for mode in ("auto", "none"):
        runner = Engine(tmp_path, None, PLAIN, quantization=mode).runner
        assert not held_matrices(runner.model)


def test_layers_that_a_checkpoint_leaves_out_stay_out(tmp_path: Path) -> None:
    """--quantization fp8 rounds only what is in 16 bits because nothing was quantized."""
    written = set(write_published(tmp_path, "nemotron-h", "modelopt-nvfp4"))
    runner = Engine(tmp_path, None, PLAIN, quantization="fp8").runner
    assert written and not held_matrices(runner.model)


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_lm_head_is_float8_by_choice(tied: bool, tmp_path: Path) -> None:
    make_peer("mamba2" if tied else "nemotron-h").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    for chosen in (False, True):
        model = engine(tmp_path, quantize_lm_head=chosen).runner.model
        assert ("lm_head" in held_matrices(model)) is chosen
        assert model.embed(torch.arange(4)).dtype == torch.float32
        assert logits(model).shape == (*TOKENS.shape, VOCAB)


def test_a_flag_without_effect_is_refused() -> None:
    assert not EngineConfig(quantization="fp8", quantize_lm_head=True).problems()
    (problem,) = EngineConfig(quantize_lm_head=True).problems()
    assert problem.startswith("--quantize-lm-head: --quantization auto rounds no weights; use")


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_says_how_many_channels_share_a_scale(form: str) -> None:
    whole = ("modelopt-fp8", "compressed-token", "compressed-static")
    wanted = 1 if form in whole else BLOCK if form == "fp8-block" else GROUP
    assert layout_of({"quantization_config": FORMS[form].config}).group == wanted
    by_blocks = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    assert layout_of({"quantization_config": by_blocks}).group == 128


def test_all_forms_are_tested() -> None:
    assert {*CASES.values(), *FOUR_BITS} - {"online"} == set(FORMS)
