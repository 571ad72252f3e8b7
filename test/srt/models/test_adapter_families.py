"""Adapters under the names that families publish: the logits of merged checkpoints, as
transformers' models make and save them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_rig import merge, write_adapter
from peer_models import VOCAB, make_peer
from tiny_model import load_model

from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.ops import TORCH
from mamba_eagle.lora.slots import AdapterSlots
from mamba_eagle.models.loader import place_of, stored_tensors

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MAMBA, MLP = {"in_proj", "out_proj"}, {"gate_proj", "up_proj", "down_proj"}
TOKENS = torch.arange(40) * 7 % VOCAB
FAMILIES = {
    "nemotron-h": ATTENTION | MAMBA | {"up_proj", "down_proj"},
    "nemotron-3-super": ATTENTION | MAMBA | {"up_proj", "down_proj"},  # of shared experts
    "mamba2": MAMBA,
    "bamba": ATTENTION | MAMBA | MLP,
    "granite": ATTENTION | MAMBA | {"input_linear", "output_linear"},
    "falcon-h1": ATTENTION | MAMBA | MLP,  # with factors in its matrices
    "zamba2": MAMBA,
    "qwen3-next": ATTENTION | MLP | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
    "qwen3.5": ATTENTION | MLP | {"in_proj_qkv", "in_proj_z", "out_proj"},
    "olmo-hybrid": ATTENTION | MLP,
    "kimi-linear": {"q_proj", "b_proj", "o_proj"},
    "lfm2": {"q_proj", "k_proj", "v_proj", "in_proj"},
    "llama": ATTENTION | MLP,
    "qwen3": ATTENTION | MLP,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_a_family_is_its_merged_model(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "model"
    make_peer(family).save_pretrained(folder)
    model = load_model(folder)
    prepare_for_inference(model, TORCH)
    slots = AdapterSlots(model, None, TORCH, 2, 4, 3, torch.device("cpu"))
    modules = [
        name.removesuffix(".weight")
        for name in stored_tensors(folder)
        if (place := place_of(model, name)) is not None and place.name in slots.sizes
    ]
    assert {name.rpartition(".")[2] for name in modules} >= FAMILIES[family]
    adapter = write_adapter(tmp_path / "adapter", folder, 1, 3, modules)
    merged = load_model(merge(tmp_path / "merged", folder, adapter))

    slots.keep(7, slots.read(str(adapter)))
    slots.load(1, 7)
    slots.admit(2, 1)
    requests, length = torch.tensor([0, 2]), len(TOKENS)
    with torch.no_grad():
        ctx = FullSequenceContext(2, length)
        with slots.over(requests, length):
            own = model.compute_logits(model(TOKENS.repeat(2), ctx)).unflatten(0, (2, length))
        alone = model.compute_logits(model(TOKENS, FullSequenceContext(1, length)))
        wanted = merged.compute_logits(merged(TOKENS, FullSequenceContext(1, length)))
    torch.testing.assert_close(own[0], alone, rtol=0, atol=2e-4)
    torch.testing.assert_close(own[1], wanted, rtol=0, atol=2e-4)
    assert float((wanted - alone).abs().max()) > 0.1
