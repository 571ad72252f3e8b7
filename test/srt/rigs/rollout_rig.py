"""Engines whose weights are replaced: what they say, and other weights for them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mamba_eagle import Engine
from mamba_eagle.embedded import EMBEDDED_MODEL

PROMPTS = [f"Question: {number} + 7 =" for number in range(5)]
SAMPLED = {"max_new_tokens": 20, "sampling_seed": 5, "ignore_eos": True}
Change = Callable[[dict[str, torch.Tensor]], None]


def texts(engine: Engine, prompts: list[str] = PROMPTS) -> list[Any]:
    """Tokens and their logprobs, of which the latter see the smallest change."""
    replies = engine.generate(prompts, SAMPLED, return_logprob=True)
    return [reply["meta_info"]["output_token_logprobs"] for reply in replies]


def post(engine: Engine, path: str, **body: Any) -> Any:
    return asyncio.run(engine.async_post(path, body))


def shaken(weights: dict[str, torch.Tensor]) -> None:
    """As after some steps of training."""
    draw = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.ndim > 1:
            noise = torch.randn(weight.shape, generator=draw) * weight.float().std() / 2
            weights[name] = (weight.float() + noise).to(weight.dtype)


def checkpoint(folder: Path, change: Change = shaken, like: Path = EMBEDDED_MODEL) -> Path:
    """The embedded model with other weights."""
    shutil.copytree(like, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder
