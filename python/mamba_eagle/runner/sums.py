"""The table of sums of a runner's group, as --all-reduce asks for it."""

import logging

import torch

from mamba_eagle.backend.base import Backend
from mamba_eagle.config import NO_SUMS_ON_A_CPU, ConfigError, EngineConfig
from mamba_eagle.parallel.groups import Group, Site
from mamba_eagle.parallel.sum_table import COLLECTIVES, SumTable

log = logging.getLogger("mamba_eagle.runner")

MAX_TOKENS = 1024  # rooms have one place per rank and token; beyond, what is sent counts, not steps


def sums_for(config: EngineConfig, group: Group, backend: Backend, size: int) -> SumTable:
    """How the ranks of ``group`` add up the residual stream's parts, [n, size], in steps of up to
    MAX_TOKENS nodes; all of them together. What is larger is for the collective.

    Raises: ConfigError if --all-reduce asks for what is there on GPUs only.
    """
    name, group.in_order = config.all_reduce, config.exact
    if group.size == 1 or name == "nccl" or config.tp_size > config.ranks_per_node:
        return COLLECTIVES
    if backend.place.on_host:
        if name == "auto":
            return COLLECTIVES
        raise ConfigError([f"--all-reduce {name}: {NO_SUMS_ON_A_CPU}"])
    # torch's distributed package, which is for several ranks on GPUs only
    from mamba_eagle.parallel.sums.choose import choose_sums
    from mamba_eagle.parallel.sums.one_shot import OrderedSum, PushedSum
    from mamba_eagle.parallel.sums.trial import Bench, Captured

    tokens = min(config.max_running_requests * config.tree_shape.nodes, MAX_TOKENS)
    site = Site(group, tokens, size, backend.dtype)
    kind = OrderedSum if config.exact else PushedSum
    table = choose_sums(
        site, kind, backend.layer_ops.add_rms_norm, Bench(Captured), or_collective=name == "auto"
    )
    torch.cuda.empty_cache()  # pools get what is free
    log.info("sums over ranks by number of tokens: %s", table.text)
    return table
