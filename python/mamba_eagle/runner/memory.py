"""How many slots fit: the sizes of a token, a checkpoint and a running request."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.models.config import ModelConfig

CPU_KV_SLOTS = 65536
CPU_CACHED_CHECKPOINTS = 192


class MemoryPlan(NamedTuple):
    kv_slots: int
    checkpoints: int
    rows: int  # rows of a request's buffer
    kv_slot_bytes: int
    checkpoint_bytes: int


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    draft: ModelConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryPlan:
    """Sizes of the pools: what the flags say, else what fits.

    Raises: ConfigError when a flag is too small to serve one request, or nothing fits.
    """
    rows = config.mamba_rows or default_rows(config)
    problems = []
    if config.mamba_verify_mode == "deferred" and rows < config.tree_shape.nodes:
        problems.append(
            f"--mamba-rows {rows}: must be at least the tree's {config.tree_shape.nodes} nodes"
        )
    if config.mamba_verify_mode == "snapshot":
        rows = config.tree_shape.nodes
    kv_bytes = sum(
        2 * part.num_attention_layers * a.num_kv_heads * a.head_dim * dtype.itemsize
        for part in (model, draft)
        if part is not None and (a := part.attention) is not None
    )
    ssm_bytes = getattr(torch, config.mamba_ssm_dtype).itemsize
    checkpoint_bytes = model.hidden_size * dtype.itemsize  # the feature
    if (m := model.mamba) is not None:
        checkpoint_bytes += model.num_mamba_layers * (
            m.num_heads * m.head_dim * m.state_size * ssm_bytes
            + (m.conv_kernel - 1) * m.conv_dim * dtype.itemsize
        )
    running = config.max_running_requests
    kv_slots, checkpoints = config.max_total_tokens, config.max_mamba_cache_size
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - config.mem_fraction_static) * total)
        row_bytes = checkpoint_bytes  # row buffers of a request are at most about one state
        budget -= running * row_bytes * (rows if config.mamba_verify_mode == "snapshot" else 1)
        checkpoints = checkpoints or max(running, int(budget * 0.5) // checkpoint_bytes)
        left = budget - checkpoints * checkpoint_bytes
        kv_slots = kv_slots or max(0, min(2_000_000, left // max(kv_bytes, 64)))
    kv_slots = kv_slots or CPU_KV_SLOTS
    checkpoints = checkpoints or running + CPU_CACHED_CHECKPOINTS
    least = 2 * config.tree_shape.nodes + 2
    if kv_slots < least:
        problems.append(
            f"--max-total-tokens {kv_slots}: one request needs {least} slots for two trees of "
            f"{config.tree_shape.nodes} nodes; raise it or lower --speculative-num-draft-tokens"
        )
    if problems:
        raise ConfigError(problems)
    return MemoryPlan(kv_slots, checkpoints, rows, kv_bytes, checkpoint_bytes)


def default_rows(config: EngineConfig) -> int:
    """Room for the tree and some accepted tokens: longer chains cost a step more, folds less."""
    return config.tree_shape.nodes + 20
