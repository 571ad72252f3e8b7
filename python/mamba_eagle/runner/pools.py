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
    sizes, place = model.config, backend.place
    running = config.max_running_requests + place.padding_slots
    stops = 8 if place.on_host else MAX_STOP_TOKEN_IDS + len(sizes.eos_token_ids)
    table = RequestTable(running, context_length(config, sizes), backend.device, stops)
    table.state_slot[config.max_running_requests :] = memory.state_slots
    kv = KVPool(
        sizes.num_attention_layers,
        memory.kv_slots,
        sizes.attention,
        backend.dtype,
        backend.device,
        stored_as=kv_dtype(config.kv_cache_dtype, backend.dtype),
    )
    states = StatePool(
        sizes.num_recurrent_layers,
        memory.state_slots + place.padding_slots,
        sizes.recurrence,
        model.feature_size,
        backend.state_rounding(
            config.mamba_ssm_rounding, getattr(torch, config.mamba_ssm_dtype), table
        ),
        backend.dtype,
        backend.device,
    )
    size = SchemeSize(
        layers=sizes.num_recurrent_layers,
        features=model.feature_size,
        rows=memory.rows,
        nodes=config.tree_shape.nodes,
        accepts=config.tree_shape.depth + 1,
    )
    scheme = backend.state_scheme(config.mamba_verify_mode, sizes.recurrence, size, table, states)
    mixers = [part for part in model.modules() if isinstance(part, Recurrent)]
    journals = backend.saved_journals(
        memory.journals,
        config.journal_rows,
        sorted(mixers, key=lambda mixer: mixer.index),
        states,
        table,
    )
    return Pools(table, kv, states, scheme, journals)
