"""Every drafter for the tiny model, good enough that some drafts are accepted and some are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from runner_harness import Engine, Settings
from tiny_blocks import DFLASH_CONFIG, DSPARK_CONFIG, write_block_drafter
from tiny_heads import write_eagle3_head, write_mtp_head
from tiny_model import HEAD_CONFIG, MODEL_CONFIG, load_model, write_folder, write_head

MAMBA = {name: value for name, value in MODEL_CONFIG.items() if name not in HEAD_CONFIG}


class TinyDrafter(NamedTuple):
    algorithm: str
    write: Callable[[Path, Path], Path | None]  # (new folder, target's folder) -> its folder

    def engine(self, folder: Path, target: Path, settings: Settings, **others: object) -> Engine:
        settings = settings._replace(algorithm=self.algorithm)
        return Engine(target, self.write(folder, target), settings, **others)


def write_noisy_copy(folder: Path, target: Path) -> Path:
    """The target with its output weights disturbed: right about half of the time."""
    model = load_model(target)
    generator = torch.Generator().manual_seed(3)
    weight = model.lm_head.weight
    with torch.no_grad():
        scale = 0.3 * weight.std()
        weight.add_((torch.randn(weight.shape, generator=generator) * scale).bfloat16())
    return write_folder(folder, model.config.raw, model)


def modules(count: int, pattern: str) -> Callable[[Path, Path], Path]:
    return lambda folder, target: write_mtp_head(
        folder, target, num_nextn_predict_layers=count, mtp_hybrid_override_pattern=pattern
    )


def block(config: dict[str, object], **changes: object) -> Callable[[Path, Path], Path]:
    return lambda folder, target: write_block_drafter(folder, target, config, **changes)


DRAFTERS = {
    "eagle": TinyDrafter("EAGLE", write_head),
    "eagle-mamba": TinyDrafter(
        "EAGLE",
        lambda folder, target: write_head(folder, target, hybrid_override_pattern="M-", **MAMBA),
    ),
    "eagle3": TinyDrafter("EAGLE3", write_eagle3_head),
    "mtp": TinyDrafter("NEXTN", modules(1, "*E")),
    "mtp-mamba": TinyDrafter("MTP", modules(1, "M-")),
    "mtp-modules": TinyDrafter("MTP", modules(4, "M*")),
    "standalone": TinyDrafter("STANDALONE", write_noisy_copy),
    "dflash": TinyDrafter("DFLASH", block(DFLASH_CONFIG)),
    "dspark": TinyDrafter("DSPARK", block(DSPARK_CONFIG)),
    "ngram": TinyDrafter("NGRAM", lambda folder, target: None),
}
