"""The geometry of a model that fits on no single GPU, Nemotron 3 Super's: what each of two ranks
or stages holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mamba_eagle.model_config import ModelConfig, Span
from mamba_eagle.models.loader import created_as
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.parallel.shard import Shard, local
from mamba_eagle.parallel.stages import staged

SUPER = Path(__file__).parents[4] / "benchmark/models/nemotron-3-super"
H200_BYTES = 150.8e9


def parameters(config: ModelConfig) -> dict[str, nn.Parameter]:
    with created_as(torch.bfloat16, torch.device("meta")):
        return dict(model_class(config)(config).named_parameters())


def num_bytes(config: ModelConfig) -> int:
    return sum(parameter.nbytes for parameter in parameters(config).values())


def test_two_gpus_hold_what_one_cannot() -> None:
    """Weights, and beside them the largest tensor three times: a rank draws it as a whole, scales
    it, and keeps its part."""
    config = read_model_config(SUPER)
    whole = num_bytes(config)
    assert whole > 1.5 * H200_BYTES
    largest = max(parameter.nbytes for parameter in parameters(config).values())
    half = len(config.blocks) // 2
    ranks = [local(config, Shard(rank, 2)) for rank in range(2)]
    stages = [staged(config, span, False) for span in (Span(0, half), Span(half, 2 * half))]
    for part in (*ranks, *stages):
        assert num_bytes(part) < 0.51 * whole
        assert num_bytes(part) + 3 * largest < 0.9 * H200_BYTES
