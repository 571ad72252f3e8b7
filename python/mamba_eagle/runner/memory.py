"""How many slots fit: the sizes of a token, a state slot and a running request."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.drafting.model_drafter import draft_rows
from mamba_eagle.model_config import Mamba2Config, ModelConfig

CPU_KV_SLOTS = 65536
CPU_CACHED_STATES = 192
GPU_KV_SLOTS = 2_000_000
WIDEST_HISTORY = 3
GRAPHS_AT_LEAST = 250_000_000
# Beside a tree's: longer journals cost a step more, folds less. On a GPU 3 of them are history and 14
# the journal's: with 8 nodes that is a quarter of a 9B model's state, and with 16 nodes the kernel's
# products are 32 wide, where a journal of more than 16 would make them 64.
JOURNAL_ROWS = 17


class MemoryPlan(NamedTuple):
    kv_slots: int
    state_slots: int
    rows: int  # rows of a request's buffer
    kv_slot_bytes: int
    checkpoint_bytes: int
    request_bytes: int = 0  # rows, or a state a node, of a running request
    graph_bytes: int = 0  # logits of the largest step, and what CUDA graphs keep for themselves


class Available(NamedTuple):
    """Memory for pools, the weights being there already. Bytes."""

    budget: int
    text: str  # where that number comes from


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    feature_size: int,
    draft: ModelConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryPlan:
    """Sizes of the pools: what the flags say, else what fits. feature_size: numbers that a
    state slot keeps of its last token.

    Raises: ConfigError when a flag is too small to serve one request, or nothing fits.
    """
    nodes, least = config.tree_shape.nodes, min_rows(config, device)
    rows = config.mamba_rows or default_rows(config, device)
    problems = []
    if config.mamba_verify_mode == "deferred" and rows < least:
        problems.append(
            f"--mamba-rows {rows}: must be at least {least} with a tree of {nodes} nodes"
        )
    if config.mamba_verify_mode == "snapshot":
        rows = config.tree_shape.nodes
    size = dtype.itemsize
    ssm_size = getattr(torch, config.mamba_ssm_dtype).itemsize
    kv_bytes = kv_slot_bytes(model, size)
    checkpoint_bytes = state_bytes(model, ssm_size, size) + feature_size * size
    request_bytes = row_bytes(model, config.mamba_verify_mode, rows, feature_size, size)
    if draft is not None:
        kv_bytes += kv_slot_bytes(draft, size)
        checkpoint_bytes += state_bytes(draft, ssm_size, size)
        request_bytes += row_bytes(draft, "deferred", draft_rows(config), 0, size)
    available = available_memory(config, device)
    running, padding = config.max_running_requests, padding_slots(device)
    graphs = 0
    if device.type == "cuda" and not config.disable_cuda_graph:
        graphs = graph_bytes(running * nodes, model)
    cached, max_slots = CPU_CACHED_STATES, CPU_KV_SLOTS
    if device.type == "cuda":
        cached, max_slots = available.budget // checkpoint_bytes, GPU_KV_SLOTS
    left = available.budget - graphs - (running + padding) * request_bytes
    left -= padding * checkpoint_bytes
    state_slots = config.max_mamba_cache_size
    if not state_slots:
        state_slots = max(running, min(running + cached, left // 2 // checkpoint_bytes))
    left -= state_slots * checkpoint_bytes
    kv_slots = config.max_total_tokens
    if not kv_slots:
        kv_slots = max(0, min(max_slots, left // max(kv_bytes, 64)))
    least = 2 * config.tree_shape.nodes + 2
    plan = MemoryPlan(
        kv_slots, state_slots, rows, kv_bytes, checkpoint_bytes, request_bytes, graphs
    )
    needed = left - max(kv_slots, least) * kv_bytes
    if needed < 0:
        problems.append(
            f"{memory_table(plan, config, available.text)}\n"
            f"that is {gigabytes(-needed)} too much: lower --max-running-requests, "
            "--max-mamba-cache-size or --max-total-tokens, or use --mamba-ssm-dtype bfloat16"
        )
    elif kv_slots < least:
        problems.append(
            f"--max-total-tokens {kv_slots}: one request needs {least} slots for two trees of "
            f"{config.tree_shape.nodes} nodes; raise it or lower --speculative-num-draft-tokens"
        )
    if problems:
        raise ConfigError(problems)
    return plan


def padding_slots(device: torch.device) -> int:
    """Request slots and state slots that nobody owns: what fills up a batch on a GPU."""
    return int(device.type == "cuda")


def graph_bytes(tokens: int, model: ModelConfig) -> int:
    """Of steps with up to ``tokens`` nodes: their logits in float32 once, and as much again for
    activations, for what a drafter says of its lanes, and for the graphs."""
    return 2 * tokens * model.vocab_size * 4 + GRAPHS_AT_LEAST


def kv_slot_bytes(model: ModelConfig, itemsize: int) -> int:
    """Keys and values of a token in all attention layers."""
    a = model.attention
    if a is None:
        return 0
    return 2 * model.num_attention_layers * a.num_kv_heads * a.head_dim * itemsize


def state_bytes(model: ModelConfig, ssm_itemsize: int, itemsize: int) -> int:
    """The recurrent state after a token, with the convolution's history, in all layers."""
    m = model.mamba
    if m is None:
        return 0
    history = (m.conv_kernel - 1) * m.conv_dim * itemsize
    return model.num_mamba_layers * (
        m.num_heads * m.head_dim * m.state_size * ssm_itemsize + history
    )


def row_bytes(model: ModelConfig, mode: str, rows: int, feature_size: int, itemsize: int) -> int:
    """What a running request takes beside its state slot."""
    m = model.mamba
    if m is None:
        return 0
    history = (m.conv_kernel - 1) * m.conv_dim * itemsize
    places = model.num_mamba_layers * (history + rows * node_bytes(m, mode, itemsize))
    return places + rows * feature_size * itemsize


def min_rows(config: EngineConfig, device: torch.device) -> int:
    """A tree's nodes; on a GPU, which folds a step ahead, also an accepted path and the history of
    the widest convolution that models have."""
    shape = config.tree_shape
    ahead = shape.depth + 1 + WIDEST_HISTORY if device.type == "cuda" else 0
    return shape.nodes + ahead


def default_rows(config: EngineConfig, device: torch.device) -> int:
    return max(config.tree_shape.nodes + JOURNAL_ROWS, min_rows(config, device))


def node_bytes(mamba: Mamba2Config, verify_mode: str, itemsize: int) -> int:
    """What one row, or one tree node's snapshot, takes in a layer."""
    inputs = mamba.conv_dim * itemsize
    if verify_mode == "snapshot":
        return inputs + mamba.num_heads * mamba.head_dim * mamba.state_size * 4
    xB = (mamba.inner_size + mamba.num_groups * mamba.state_size) * itemsize
    return inputs + xB + 2 * mamba.num_heads * 4  # and dt and its sum


def available_memory(config: EngineConfig, device: torch.device) -> Available:
    """What is free now, less what --mem-fraction-static leaves to others."""
    share = config.mem_fraction_static
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - share) * total)
        return Available(
            budget,
            f"of {gigabytes(total)} GPU memory {gigabytes(free)} are free beside the weights; "
            f"--mem-fraction-static {share} leaves {gigabytes(budget)}",
        )
    free = free_main_memory()
    budget = int(share * free)
    text = f"{gigabytes(free)} memory are free beside the weights; "
    return Available(budget, text + f"--mem-fraction-static {share} leaves {gigabytes(budget)}")


def free_main_memory() -> int:
    """What programs can still have; where the system does not say, no limit."""
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62


def memory_table(plan: MemoryPlan, config: EngineConfig, head: str = "") -> str:
    """What the pools take, one line each, below a line that says what else there is."""
    running = config.max_running_requests
    what = "rows" if config.mamba_verify_mode == "deferred" else "node states"
    lines = [
        ("KV", plan.kv_slots, "tokens", plan.kv_slot_bytes),
        ("state_slots", plan.state_slots, "states", plan.checkpoint_bytes),
        (what, running, "requests", plan.request_bytes),
    ]
    table = [
        f"{name:<12}{count:>10} {unit:<9} x {size_text(size):>9} = {size_text(count * size):>9}"
        for name, count, unit, size in lines
    ]
    if plan.graph_bytes:
        table.append(f"{'CUDA graphs':<47} {size_text(plan.graph_bytes):>9}")
    return "\n".join([head, *table] if head else table)


def size_text(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
