"""All that outlives a step, allocated for one model on one rank."""

from typing import NamedTuple

import torch

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool, kv_dtype
from mamba_eagle.backend.state import SchemeSize, StateScheme
from mamba_eagle.config import ConfigError, EngineConfig, ModelSettings
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.limits import MAX_STOP_TOKEN_IDS
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.runner.memory import MemoryPlan

UNLIMITED_CONTEXT = 32768  # tokens, for a model whose config.json gives no limit


class Pools(NamedTuple):
    """The scheduler assigns all slots in them."""

    table: RequestTable
    kv: KVPool
    states: StatePool
    scheme: StateScheme
    journals: SavedJournals


def context_length(config: ModelSettings, model: ModelConfig) -> int:
    """Tokens that a request may have at most.

    Raises: ConfigError if --context-length asks for more than the model was made for.
    """
    limit, requested = model.max_position_embeddings, config.context_length
    if limit and requested is not None and requested > limit:
        raise ConfigError(
            [f"--context-length {requested}: the model supports at most {limit} tokens"]
        )
    return requested or limit or UNLIMITED_CONTEXT


def make_pools(
    config: EngineConfig, model: CausalLM, memory: MemoryPlan, backend: Backend
) -> Pools:
    """As large as ``memory`` says. model: this rank's part of the target."""
    sizes, place, dtype, device = model.config, backend.place, backend.dtype, backend.device
    running = config.max_running_requests + place.padding_slots
    stops = 8 if place.on_host else MAX_STOP_TOKEN_IDS + len(sizes.eos_token_ids)
    table = RequestTable(running, context_length(config, sizes), device, stops)
    table.state_slot[config.max_running_requests :] = memory.state_slots
    kv = KVPool(
        *(sizes.num_attention_layers, memory.kv_slots, sizes.attention, dtype, device),
        stored_as=kv_dtype(config.kv_cache_dtype, dtype),
    )
    ssm_dtype = getattr(torch, config.mamba_ssm_dtype)
    rounding = backend.state_rounding(config.mamba_ssm_rounding, ssm_dtype, table)
    layers, features = sizes.num_recurrent_layers, model.feature_size
    slots = memory.state_slots + place.padding_slots
    states = StatePool(layers, slots, sizes.recurrence, features, rounding, dtype, device)
    shape = config.tree_shape
    size = SchemeSize(layers, features, memory.rows, shape.nodes, accepts=shape.depth + 1)
    scheme = backend.state_scheme(config.mamba_verify_mode, sizes.recurrence, size, table, states)
    mixers = [part for part in model.modules() if isinstance(part, Recurrent)]
    mixers.sort(key=lambda mixer: mixer.index)
    kind = backend.journal_kind(mixers, states)
    journals = kind(memory.journals, config.journal_rows, mixers, states, table, place)
    return Pools(table, kv, states, scheme, journals)
