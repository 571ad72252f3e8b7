"""The multi-token-prediction layer of Qwen3-Next and Qwen3.5: what transformers computes, and a
drafter that changes no text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peer_models import PEERS, VOCAB, fill, make_peer, peer_text
from runner_harness import Engine, Settings, greedy
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_layers import MtpLayer

from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.loader import load_weights
from mamba_eagle.models.qwen_mtp import QwenMtpHead
from mamba_eagle.models.registry import mtp_module, read_model_config

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "post_norm.": "norm.",
    "mtp_block.": "layers.0.",
}


class Peer(NamedTuple):
    model: nn.Module
    layer: MtpLayer
    folder: Path


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """A model whose folder has the layer's weights, under their published names."""
    model, folder = make_peer(request.param), tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    last = model.base_model.layers[-1]
    norm = type(last.input_layernorm)
    layer = MtpLayer(model.config, type(last), norm, len(model.base_model.layers) - 1).eval()
    fill(layer, PEERS[request.param][0], seed=7)
    weights = load_file(folder / "model.safetensors")
    for name, value in layer.state_dict().items():
        for theirs, published in NAMES.items():
            if name.startswith(theirs):
                name = published + name.removeprefix(theirs)
        weights[f"mtp.{name}"] = value
    save_file(weights, folder / "model.safetensors")
    return Peer(model, layer.requires_grad_(False), folder)


def test_the_layer_is_that_of_transformers(peer: Peer) -> None:
    head = QwenMtpHead(read_model_config(peer.folder, mtp_module(peer.folder)))
    load_weights(head, peer.folder)
    generator = torch.Generator().manual_seed(1)
    embedded, hidden = torch.randn(2, 1, 19, 64, generator=generator)
    positions = torch.arange(19)[None]
    angles = peer.model.base_model.rotary_emb(hidden, positions)
    with torch.no_grad():
        expected = peer.layer(embedded, hidden, angles, None, positions, None)
        found = head(0, embedded[0], hidden[0], FullSequenceContext(1, 19))
    assert float(expected.std()) > 0.5
    assert float((found - expected[0]).abs().max()) < 5e-5


def test_drafts_change_no_text(peer: Peer) -> None:
    prompt = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        text = peer_text(peer.model, prompt, 24)
    for settings in (
        Settings("NEXTN", topk=3, steps=3, nodes=8),
        Settings("NEXTN", "snapshot", 1, 3, 4),
    ):
        engine = Engine(peer.folder, None, settings, context_length=160)
        live = engine.start(prompt, greedy(24), saves=(9,))
        engine.finish([live])
        assert live.output == text
        again = engine.start(prompt, greedy(24), hit=live.saved[9])
        engine.finish([again])
        assert again.output == text
