"""How many slots fit into memory, from the bytes per KV slot, state slot and running request."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.journals import journal_bytes
from mamba_eagle.backend.pools import kv_dtype
from mamba_eagle.config import ConfigError, DraftSettings, EngineConfig
from mamba_eagle.drafting.base import DraftSource
from mamba_eagle.drafting.model_drafter import draft_rows
from mamba_eagle.model_config import ModelConfig, RecurrenceConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.runner.ranks import Ranks

MIN_GRAPH_BYTES = 250_000_000
# Rows beyond the tree's own. Longer journals make each step slower but folds rarer. On a GPU, 3 of
# these rows hold history and 14 the journal. With 8 nodes, a request's rows then take a quarter of
# the memory of a 9B model's state. With 16 nodes the kernel's products are 32 wide; a journal of
# more than 16 rows would make them 64 wide.
JOURNAL_ROWS = 17


class MemoryPlan(NamedTuple):
    """How many slots there are and how many bytes each takes."""

    kv_slots: int
    state_slots: int
    rows: int  # per request, of its recurrent layers
    kv_slot_bytes: int
    state_slot_bytes: int
    request_bytes: int = 0  # rows or node states of a running request
    journals: int = 0  # journal slots
    journal_bytes: int = 0  # of a journal slot
    graph_bytes: int = 0  # logits of the largest step, and memory that CUDA graphs reserve

    def agreed(self, ranks: Ranks) -> MemoryPlan:
        """With as many slots as fit on every rank of every stage."""
        slots = ranks.smallest([self.kv_slots, self.state_slots, self.journals])
        return self._replace(kv_slots=slots[0], state_slots=slots[1], journals=slots[2])


class Available(NamedTuple):
    """Memory for pools after the weights are loaded."""

    budget: int  # bytes
    text: str  # how the budget was derived, for log and error messages


def plan_memory(
    config: EngineConfig, target: CausalLM, source: DraftSource | None, backend: Backend
) -> MemoryPlan:
    """Sizes of the pools: as set by flags, otherwise as many slots as fit. source: of the drafter.

    Raises: ConfigError if a flag is too small to serve one request, or if the pools do not fit.
    """
    place, problems = backend.place, []
    rows, required = config.mamba_rows or default_rows(config, backend), min_rows(config, backend)
    if config.mamba_verify_mode == "deferred" and rows < required:
        problems.append(
            f"--mamba-rows {rows}: must be at least {required} with a tree of "
            f"{config.tree_shape.nodes} nodes"
        )
    if config.mamba_verify_mode == "snapshot":
        rows = config.tree_shape.nodes
    plan = _sizes(config, target, source, rows, backend)
    available = available_memory(config, backend)
    running, padding = config.max_running_requests, place.padding_slots
    left = available.budget - plan.graph_bytes - (running + padding) * plan.request_bytes
    left -= padding * plan.state_slot_bytes
    state_slots, journals = config.max_mamba_cache_size, config.num_journals
    if not state_slots:
        cached = place.max_cached_states
        if cached is None:
            cached = available.budget // max(plan.state_slot_bytes, 1)
        pair_bytes = plan.state_slot_bytes
        if journals is None:
            pair_bytes += int(plan.journal_bytes * place.journals_per_state)
        state_slots = max(running, min(running + cached, left // 2 // max(pair_bytes, 1)))
    if journals is None:
        journals = int(state_slots * place.journals_per_state)
    left -= state_slots * plan.state_slot_bytes
    if journals:
        left -= (journals + 1) * plan.journal_bytes  # one for padding
    kv_slots = config.max_total_tokens
    if not kv_slots:
        kv_slots = max(0, min(place.max_kv_slots, left // max(plan.kv_slot_bytes, 64)))
    plan = plan._replace(kv_slots=kv_slots, state_slots=state_slots, journals=journals)
    problems += _shortage(plan, config, left, available.text)
    if problems:
        raise ConfigError(problems)
    return plan


def _sizes(
    config: EngineConfig, target: CausalLM, source: DraftSource | None, rows: int, backend: Backend
) -> MemoryPlan:
    """A plan with the bytes per slot and request; the numbers of slots are left 0."""
    model, feature_size = target.config, target.feature_size
    size = backend.dtype.itemsize
    ssm_size = getattr(torch, config.mamba_ssm_dtype).itemsize
    kv_size = kv_dtype(config.kv_cache_dtype, backend.dtype).itemsize
    kv_bytes = kv_slot_bytes(model, kv_size)
    state_slot_bytes = state_bytes(model, ssm_size, size) + feature_size * size
    request_bytes = row_bytes(model, config.mamba_verify_mode, rows, feature_size, size)
    if source is not None and (draft := source.config) is not None:
        kv_bytes += kv_slot_bytes(draft, kv_size)
        state_slot_bytes += state_bytes(draft, ssm_size, size)
        request_bytes += row_bytes(draft, "deferred", draft_rows(config), 0, size)
    graphs = 0
    if not (backend.place.on_host or config.disable_cuda_graph):
        graphs = graph_bytes(config.max_running_requests * config.tree_shape.nodes, model)
        if backend.samples_in_kernels and config.num_ranks == 1:
            graphs += sampling_bytes(config.max_running_requests + 1, model)
    own_journal = journal_bytes(
        model.recurrence, model.num_recurrent_layers, config.journal_rows, feature_size, size
    )
    return MemoryPlan(
        kv_slots=0,
        state_slots=0,
        rows=rows,
        kv_slot_bytes=kv_bytes,
        state_slot_bytes=state_slot_bytes,
        request_bytes=request_bytes,
        journal_bytes=own_journal,
        graph_bytes=graphs,
    )


def _shortage(plan: MemoryPlan, config: EngineConfig, left: int, available: str) -> list[str]:
    """Problems of a plan that does not fit or cannot serve a single request; [] if there are none.

    left: bytes that remain for KV slots.
    """
    nodes = config.tree_shape.nodes
    required = 2 * nodes + 2
    excess = max(plan.kv_slots, required) * plan.kv_slot_bytes - left
    if excess > 0:
        return [
            f"{memory_table(plan, config, available)}\n"
            f"exceeds available memory by {gigabytes(excess)}: lower --max-running-requests, "
            "--max-mamba-cache-size, --max-journals, --mamba-rows or --max-total-tokens, or use "
            "--mamba-ssm-dtype bfloat16"
        ]
    if plan.kv_slots < required:
        return [
            f"--max-total-tokens {plan.kv_slots}: one request needs {required} KV slots for two "
            f"trees of {nodes} nodes; raise it or lower --speculative-num-draft-tokens"
        ]
    return []


def graph_bytes(tokens: int, model: ModelConfig) -> int:
    """Bytes that graphed steps of up to ``tokens`` nodes need: their logits, of at most 32 bits,
    as much again for activations and the logits of a drafter's lanes, and the graphs."""
    return 2 * tokens * model.vocab_size * 4 + MIN_GRAPH_BYTES


def sampling_bytes(requests: int, model: ModelConfig) -> int:
    """Bytes of the sampler's tables by request slot and token: whether the prompt has it, how often
    the output does, its bias, and whether it ends the request."""
    return requests * model.vocab_size * (1 + 4 + 4 + 1)


def kv_slot_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values in all attention layers."""
    a = model.attention
    if a is None:
        return 0
    return model.num_attention_layers * a.kv_size * itemsize


def state_bytes(model: ModelConfig, ssm_itemsize: int, itemsize: int) -> int:
    """Bytes of the recurrent state after a token, with the convolution history, in all layers."""
    m = model.recurrence
    if m is None:
        return 0
    history = (m.conv_kernel - 1) * m.conv_dim * itemsize
    return model.num_recurrent_layers * (prod(m.state_shape) * ssm_itemsize + history)


def row_bytes(model: ModelConfig, mode: str, rows: int, feature_size: int, itemsize: int) -> int:
    """Bytes of a running request's rows or node states, convolution history and features."""
    m = model.recurrence
    if m is None:
        return 0
    history = (m.conv_kernel - 1) * m.conv_dim * itemsize
    places = model.num_recurrent_layers * (history + rows * node_bytes(m, mode, itemsize))
    return places + rows * feature_size * itemsize


def min_rows(config: DraftSettings, backend: Backend) -> int:
    """The fewest rows per request that work: a tree's nodes, and the rows beyond them that the
    backend's state scheme needs to accept a path."""
    shape = config.tree_shape
    return shape.nodes + backend.rows_ahead(shape.depth + 1)


def default_rows(config: EngineConfig, backend: Backend) -> int:
    return max(config.tree_shape.nodes + JOURNAL_ROWS, min_rows(config, backend))


def node_bytes(config: RecurrenceConfig, verify_mode: str, itemsize: int) -> int:
    """Bytes of one row, or of one node's state, in one layer."""
    inputs = config.conv_dim * itemsize + config.gate_size * 4
    if verify_mode == "snapshot":
        return inputs + prod(config.state_shape) * 4
    return inputs + sum(part.width * (4 if part.exact else itemsize) for part in config.row_parts)


def available_memory(config: EngineConfig, backend: Backend) -> Available:
    """Memory that is free now, less the part that --mem-fraction-static reserves for others."""
    share, memory = config.mem_fraction_static, backend.place.memory()
    if backend.place.on_host:  # which all ranks of a node share
        memory = memory._replace(free=memory.free // config.ranks_per_node)
    if memory.total is None:
        budget, of_total = int(share * memory.free), ""
    else:
        budget = int(memory.free - (1 - share) * memory.total)
        of_total = f"of {gigabytes(memory.total)} {memory.name} "
    return Available(
        budget,
        f"{of_total}{gigabytes(memory.free)} {'' if of_total else memory.name + ' '}are free "
        f"beside the weights; --mem-fraction-static {share} leaves {gigabytes(budget)}",
    )


def memory_table(plan: MemoryPlan, config: EngineConfig, head: str) -> str:
    """The memory of the pools, one line each, below the line ``head``."""
    running = config.max_running_requests
    what = "rows" if config.mamba_verify_mode == "deferred" else "node states"
    lines = [
        ("KV", plan.kv_slots, "tokens", plan.kv_slot_bytes),
        ("state slots", plan.state_slots, "states", plan.state_slot_bytes),
        ("journals", plan.journals, "journals", plan.journal_bytes),
        (what, running, "requests", plan.request_bytes),
    ]
    table = [
        f"{name:<12}{count:>10} {unit:<9} x {size_text(size):>9} = {size_text(count * size):>9}"
        for name, count, unit, size in lines
    ]
    if plan.graph_bytes:
        table.append(f"{'CUDA graphs':<47} {size_text(plan.graph_bytes):>9}")
    return "\n".join([head, *table])


def size_text(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
