"""What tests of draft heads share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plain_heads
import torch
from safetensors.torch import load_file, save_file
from tensor_checks import host_backend
from tiny_heads import GrowingSequence
from tiny_model import VOCAB, load_model
from torch import Tensor

from mamba_eagle.config import EngineConfig
from mamba_eagle.drafting.base import FolderSource
from mamba_eagle.drafting.eagle3 import EagleThreeNetwork
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle3 import Eagle3Head, published_name
from mamba_eagle.models.loader import load_weights
from mamba_eagle.models.registry import read_model_config

BATCH, LENGTH = 2, 21
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TAPS = (0, 2, 4)


def eagle3_network(folder: Path, target: CausalLM, prepared: bool = False) -> EagleThreeNetwork:
    names = {published_name(name) for name in load_file(folder / "model.safetensors")}
    head = Eagle3Head(read_model_config(folder, "eagle3"), names)
    load_weights(head, folder)
    if prepared:
        prepare_for_inference(head, host_backend().layer_ops)
    return EagleThreeNetwork(head.requires_grad_(False), target)


def tapped(folder: Path, taps: tuple[int, ...] = TAPS) -> CausalLM:
    target = load_model(folder)
    target.tap(taps)
    return target


def edit(folder: Path, change: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
    """New tensors by name, None removes one; new config values."""
    weights: dict[str, Tensor | None] = {
        **load_file(folder / "model.safetensors"),
        **(change or {}),
    }
    kept = {name: value.contiguous() for name, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


def roughen(folder: Path) -> Path:
    """No weight is left a one or a zero that may be forgotten, and attention is no mere mean."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    change: dict[str, Tensor | None] = {}
    for name, value in weights.items():
        if "norm" in name or name.endswith((".D", "bias")):
            change[name] = value + 0.3 * torch.randn(value.shape, generator=generator)
        if "_proj" in name and "mixer" in name:
            change[name] = value * 4
    return edit(folder, change)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(8))


def run_chain(network: DraftNetwork, tokens: Tensor, features: Tensor) -> Tensor:
    """True entries of whole sequences: tokens [b, l], the target's features [b * l, W]."""
    entries = network.entry_features(features).unflatten(0, tokens.shape)
    entries = torch.stack([plain_heads.behind(each) for each in entries])
    carry = torch.zeros(len(tokens), network.carry_size)
    return network.run_entries(tokens, entries, carry, FullSequenceContext(*tokens.shape))


def run_drafts(
    network: DraftNetwork, tokens: Tensor, features: Tensor, drafted: list[int]
) -> list[Tensor]:
    """Outputs [O] of the root, which ends ``tokens`` [l], and of the drafted tokens behind it."""
    ctx = GrowingSequence(torch.arange(len(tokens)))
    entries = plain_heads.behind(network.entry_features(features))
    carry = torch.zeros(1, network.carry_size)
    outputs = [network.run_entries(tokens[None], entries[None], carry, ctx)[0, -1]]
    for depth, token in enumerate(drafted, start=1):
        ctx.then(len(tokens) + depth - 1)
        outputs.append(network.lanes(depth, torch.tensor([token]), outputs[-1][None], ctx)[0])
    return outputs


def engine_config(model: Path, head: Path | str) -> EngineConfig:
    return EngineConfig(model_path=str(model), speculative_draft_model_path=str(head))


def problems_of(source: type[FolderSource], head: Path, target: Path) -> list[str]:
    made = source(engine_config(target, head), read_model_config(target))
    return [line.replace(f"{head}: ", "") for line in made.problems()]
