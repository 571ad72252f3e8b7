"""Models for test_exact.py: the embedded one, and small random ones of each other recurrence, which
read its tokens. Their heads are made by our own command."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from exact_rig import DRAFTERS
from peer_models import make_peer

from mamba_eagle.embedded import EMBEDDED_MODEL

VOCAB = 2048
CHANGES = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "eos_token_id": 2}
RANDOM = ("qwen3.5", "kimi-linear", "lfm2", "qwen3-next", "ling-3", "olmo-hybrid", "lfm2-moe")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
HEADS = {  # drafter -> flags of train-drafter
    "EAGLE": (),
    "EAGLE3": ("--draft-vocab-size", "900"),
    "MTP": ("--mtp-modules", "1"),
    "DFLASH": ("--draft-layers", "1"),
    "DSPARK": ("--draft-layers", "1", "--markov-rank", "8"),
}


class Target(NamedTuple):
    """A model, and who drafts for it."""

    name: str
    folder: Path
    drafters: tuple[str, ...]
    drafting: Callable[[str], list[str]]  # drafter -> flags

    @property
    def flags(self) -> list[str]:
        return ["--model-path", str(self.folder)]


EMBEDDED = Target("embedded", EMBEDDED_MODEL, DRAFTERS, lambda drafter: [])


def random_target(name: str, folder: Path) -> Target:
    """Drafters are made when they are asked for."""
    if not folder.exists():
        write_model(name, folder, noise=0.0)
    return Target(
        name, folder, (*HEADS, "STANDALONE", "NGRAM"), lambda d: drafting(name, folder, d)
    )


def write_model(name: str, folder: Path, noise: float) -> None:
    """noise: of lm_head, in deviations of its own: a drafter is to guess only some tokens right."""
    model = make_peer(name, **CHANGES)
    with torch.no_grad():
        weight = model.lm_head.weight
        generator = torch.Generator().manual_seed(1)
        weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    for file in TOKENIZER:
        shutil.copy(EMBEDDED_MODEL / file, folder)


def drafting(name: str, target: Path, drafter: str) -> list[str]:
    folder = target.with_name(f"{target.name}-{drafter}")
    if drafter == "NGRAM":
        return []
    if not folder.exists() and drafter == "STANDALONE":
        write_model(name, folder, noise=0.3)
    elif not folder.exists():
        train(target, folder, drafter)
    return ["--speculative-draft-model-path", str(folder)]


def train(target: Path, folder: Path, drafter: str) -> None:
    rng, data = random.Random(drafter), folder.with_suffix(".jsonl")
    prompts = [{"token_ids": [rng.randrange(3, VOCAB) for _ in range(9)]} for _ in range(24)]
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    flags = ["--target", str(target), "--data", str(data), "--output", str(folder)]
    flags += ["--device", "cpu", "--algorithm", drafter.lower(), "--depth", "5", "--held-out", "2"]
    flags += ["--max-new-tokens", "32", "--steps", "30", *HEADS[drafter]]
    command = [sys.executable, "-m", "mamba_eagle.cli", "train-drafter", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
