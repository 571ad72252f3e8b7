"""Models on a CPU whose weights are int8 or int4 groups, or 16 bits as they are stored: one copy of
each, and the same texts with and without speculation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peer_models import VOCAB, make_peer
from runner_harness import Engine, Settings, greedy
from step_rig import made, partings
from test_loading import logits
from test_parity import write_head
from tiny_model import load_model
from torch import nn

from mamba_eagle.config import EngineConfig
from mamba_eagle.cpu.products.packed import (
    GroupedProduct,
    PanelProduct,
    PromptProduct,
    TileProduct,
    has_bfloat16_products,
)
from mamba_eagle.devices import choose_backend, quantization_problems
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.products import PackedMatrix
from mamba_eagle.layers.weights import matrix_layers, weight_bytes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
]

PLAIN, TREE = Settings("NONE"), Settings(topk=3, steps=3, nodes=8)
FAMILIES = ("mamba2", "granite", "falcon-h1", "qwen3.5")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    make_peer(request.param).to(torch.bfloat16).save_pretrained(folder)
    write_head(folder / "head")
    return folder


def engine(folder: Path, settings: Settings = PLAIN, **others: object) -> Engine:
    head = None if settings.algorithm == "NONE" else folder / "head"
    return Engine(folder, head, settings, **others)


@pytest.mark.parametrize(
    "name, mode",
    [
        *(
            (name, "int8")
            for name in ("falcon-h1", "granite", "nemotron-3-nano", "olmo-hybrid", "zamba2")
        ),
        ("nemotron-3-nano", "auto"),
    ],
)
def test_logits_have_the_same_bits_with_and_without_speculation(
    name: str, mode: str, tmp_path: Path
) -> None:
    """Of families with experts, gates and shared blocks, in sizes that integer products take."""
    torch.manual_seed(0)
    make_peer(f"{name}-kernels").to(torch.bfloat16).save_pretrained(tmp_path)
    prompts = [[(7 * k + length) % VOCAB for k in range(length)] for length in (5, 37)]
    plain = Engine(tmp_path, None, PLAIN, quantization=mode)
    texts = [made(plain, [prompt], 24)[0] for prompt in prompts]
    drafted = Settings("NGRAM", topk=3, steps=4, nodes=8)
    assert not partings(Engine(tmp_path, None, drafted, quantization=mode), texts, seed=1)


@torch.inference_mode()
@pytest.mark.parametrize("mode, off", [("int8", 0.06), ("int4", 0.3)])
def test_logits_are_near_those_of_the_weights(mode: str, off: float, folder: Path) -> None:
    exact = logits(load_model(folder))
    found = logits(engine(folder, quantization=mode).runner.model)
    if "qwen3.5" in folder.name:  # a key's error enters what is written along it and what is read
        off *= 1.5
    assert 0 < float((found - exact).norm() / exact.norm()) < off


@torch.inference_mode()
def test_weights_that_are_kept_as_stored_give_the_same_logits(folder: Path) -> None:
    exact = logits(load_model(folder))
    found = logits(engine(folder).runner.model)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.skipif(not has_bfloat16_products(), reason="the processor has no bfloat16 products")
def test_prompts_are_multiplied_in_bfloat16_where_that_is_asked_for(folder: Path) -> None:
    """Few rows, as in decode steps, have the same bits as without."""
    model = engine(folder, cpu_prompt_dtype="bfloat16").runner.model
    exact = logits(load_model(folder))
    assert 1e-4 < float((logits(model) - exact).norm() / exact.norm()) < 0.05
    product, x = model.lm_head.packed, torch.randn(9, model.config.hidden_size)
    assert isinstance(product, PromptProduct)
    assert torch.equal(product(x, None), PanelProduct.multiply(product, x))


@pytest.mark.parametrize("mode", ["auto", "int8", "int4"])
def test_each_weight_is_there_once(mode: str, folder: Path) -> None:
    """In its product; the embedding reads rows of lm_head where both are one."""
    model = engine(folder, quantization=mode).runner.model
    for name, layer in matrix_layers(model):
        assert all(getattr(layer, leaf).is_meta for leaf in layer.matrix_names), name
        if not isinstance(layer, Linear):
            continue
        matrix = layer.matrices["weight"]
        assert isinstance(matrix, PackedMatrix)
        rounded = mode != "auto" and matrix.shape[-1] % 32 == 0
        assert isinstance(matrix.product, GroupedProduct) is rounded, name
    assert model.parts.embedding.weight.is_meta == model.config.tie_word_embeddings
    assert weight_bytes(model) <= weight_bytes(load_model(folder))  # Falcon-H1 scales its weights
    assert model.embed(torch.arange(4)).dtype == torch.float32


def test_a_drafter_has_bits_of_its_own(folder: Path) -> None:
    made = [
        engine(folder, TREE, speculative_draft_model_quantization=kind) for kind in ("auto", "int8")
    ]
    floats = {PanelProduct, TileProduct}
    for one, wanted in zip(made, (floats, {GroupedProduct})):
        assert kinds_of(one.runner.model) <= floats
        assert kinds_of(one.runner.drafter.network.head) <= wanted
    texts = [one.generate([5, 6, 7], greedy(24)).output for one in made]
    assert texts[0] == texts[1]


def kinds_of(model: nn.Module) -> set[type]:
    """Of its products whose columns are whole groups."""
    layers = [layer for _, layer in matrix_layers(model) if isinstance(layer, Linear)]
    products = [layer.matrices["weight"].product for layer in layers]
    return {type(product) for product in products if product.inputs % 32 == 0}


@pytest.mark.parametrize("mode", ["auto", "int8"])
def test_loading_imports_no_compiler_of_torch(
    mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which some operations on tensors without memory do: it takes seconds and 80 MB."""
    for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes"):
        monkeypatch.setitem(sys.modules, name, None)
    engine(folder, quantization=mode)


def test_where_there_are_no_products_integers_are_refused() -> None:
    wrong = EngineConfig(quantization="int4", device="cuda", dtype="bfloat16").problems()
    assert wrong[0].startswith("--quantization int4: --device cuda has no such products; use")
    assert wrong[1].startswith("--quantization int4: --dtype bfloat16 has no such products; use")
    (problem,) = quantization_problems(
        {"--quantization": "int8"}, choose_backend(torch.device("cpu"), torch.bfloat16)
    )
    assert problem.startswith("--quantization int8: the backend is torch (on a CPU, weights are b")
    assert not quantization_problems(
        {"--quantization": "int8"}, choose_backend(torch.device("cpu"), torch.float32)
    )
    wrong = EngineConfig(quantization="nvfp4", device="cpu").problems()
    assert wrong[0].startswith("--quantization nvfp4: --device cpu has no such products; use --dev")
    (problem,) = quantization_problems(
        {"--quantization": "nvfp4"}, choose_backend(torch.device("cpu"), torch.float32)
    )
    assert problem.startswith("--quantization nvfp4: the backend is cpu (float32 on a CPU)")
    drafter = {"speculative_draft_model_quantization": "nvfp4", "device": "cpu"}
    wrong = EngineConfig(speculative_algorithm="EAGLE", **drafter).problems()
    assert wrong[0].startswith("--speculative-draft-model-quantization nvfp4: --device cpu has no")
    assert not EngineConfig(speculative_algorithm="NONE", **drafter).problems()
