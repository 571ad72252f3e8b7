"""A rank's backend, and modules with their weights: the target's part and the drafter."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import lcm
from typing import TypeVar

import torch
from torch import nn

from mamba_eagle.backend.base import Backend
from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.devices import (
    choose_backend,
    quantization_problems,
    rank_device,
    reason,
    resolve_dtype,
)
from mamba_eagle.drafting import draft_source
from mamba_eagle.drafting.base import DraftSource
from mamba_eagle.layers.block import prepare_for_inference
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.weights import weights_come_late
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config_json import read_values
from mamba_eagle.models.loader import created_as, load_weights, random_weights
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.models.rooms import FewBitRooms
from mamba_eagle.models.split import Split, split_model
from mamba_eagle.models.staging import Staging
from mamba_eagle.parallel.shard import Shard, local
from mamba_eagle.quantization.layouts import block_of
from mamba_eagle.quantization.policy import Policy
from mamba_eagle.runner.refill import OtherForm, RefilledRooms

log = logging.getLogger("mamba_eagle.runner")

Model = TypeVar("Model", bound=nn.Module)
# mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes
_KEPT, _MAPPED = (-1, 128 << 20), (-3, 32 << 20)


def backend_for(config: EngineConfig, model: ModelConfig, rank: int) -> Backend:
    """What runs on this rank's device.

    Raises: ConfigError if the device is missing, or cannot do what the settings ask for.
    """
    device = rank_device(config, rank)
    dtype = resolve_dtype(config.dtype, model.dtype, device)
    backend = choose_backend(device, dtype, config.cpu_prompt_dtype, config.exact)
    problems = quantization_problems(config.quantizations, backend)
    if config.exact:
        problems += backend.inexact(local(model, Shard(0, config.tp_size)))
    if problems:
        raise ConfigError(problems)
    log.info("backend: %s (%s)", backend.description, reason(backend))
    return backend


def draft_source_for(
    config: EngineConfig, target: ModelConfig, shard: Shard, backend: Backend
) -> DraftSource | None:
    """None without speculation. shard: this rank among those that each layer is split over.

    Raises: ConfigError with every reason why the drafter does not fit the target.
    """
    if config.speculative_algorithm == "NONE":
        return None
    source = draft_source(config.speculative_algorithm)(config, target)
    if wrong := source.problems():
        raise ConfigError(wrong)
    source.divide(shard, backend)
    return source


def whole_model(config: EngineConfig) -> ModelConfig:
    """The target's config, whose ranks divide no group of channels that is to share a scale:
    neither the checkpoint's nor those that --quantization makes.

    Raises: FileNotFoundError, UnsupportedModel
    """
    whole = read_model_config(config.model_path)
    return replace(whole, scale_group=lcm(whole.scale_group, Policy(config.quantization).group))


def split_of(whole: ModelConfig, shard: Shard, num_stages: int, dtype: torch.dtype) -> Split | None:
    """Which slices of the target's weights a rank reads; None if all of them."""
    with created_as(dtype, torch.device("meta")):
        return split_model(model_class(whole), whole, shard, num_stages)


class Loader:
    """Makes modules on the backend's device, and reads or invents their weights."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.config, self.backend = config, backend
        self.policy = Policy(config.quantization, config.quantize_lm_head)

    def of_drafter(self) -> Loader:
        """The same for the drafter, whose weights may have bits of their own."""
        loader = Loader(self.config, self.backend)
        kind = self.config.speculative_draft_model_quantization
        if kind != "same":
            loader.policy = self.policy._replace(mode=kind)
        return loader

    def __call__(
        self,
        make: Callable[[], Model],
        path: str,
        split: Split | None = None,
        ops: LayerOps | None = None,
    ) -> Model:
        """A module, ready for inference, with the weights in ``path``.

        split: how this rank gets its part. ops: those of the backend if they are None.

        Raises: CheckpointError, FileNotFoundError; ConfigError if it does not fit in memory.
        """
        config, backend = self.config, self.backend
        ops = ops or backend.layer_ops
        model = self.empty(make)
        free = backend.place.memory().free
        if backend.place.on_host:  # which all ranks of a node share
            free //= config.ranks_per_node
        policy = self.policy
        if config.load_format == "dummy":  # what becomes float8 gets the checkpoint's form
            policy = policy._replace(block=block_of(read_values(path)))
        rooms = FewBitRooms(model, backend.device, policy, ops.keeps, free, backend.place.on_host)
        if config.load_format == "dummy":
            random_weights(model, config.random_seed, rooms, split)
        else:
            load_weights(model, path, rooms, split, self.staging)
        model.eval().requires_grad_(False)
        prepare_for_inference(model, ops)
        give_back_freed_memory()
        return model

    @property
    def staging(self) -> Staging | None:
        place = self.backend.place
        if place.on_host:
            return None
        return Staging(place.device, place.host_buffer, place.timestamp)

    def empty(self, make: Callable[[], Model]) -> Model:
        """A module whose large weights have no memory yet."""
        with created_as(self.backend.dtype, self.backend.device), weights_come_late():
            return make()

    def refill(
        self, model: CausalLM, make: Callable[[], CausalLM], path: str, split: Split | None
    ) -> bool:
        """Put the weights in ``path`` where those of a prepared model are, so that captured steps
        read them. Otherwise as a call. False: they are kept in another form or there is no memory
        for a layer twice, and the model is good for nothing."""
        try:
            rooms = RefilledRooms(model, self.empty(make), self.backend.device, self.policy)
            load_weights(rooms.model, path, rooms, split, self.staging)
        except (OtherForm, torch.OutOfMemoryError):
            return False
        return True


def give_back_freed_memory() -> None:
    """Return what was freed to the operating system, where the C library can (glibc): weights were
    rounded and put in another order, and what that needed lies between what stays. On a GPU also
    what torch keeps for later: pools are as large as the memory that is free.

    What passes free from now on stays for the next pass. Mapping it again each time took 6 % of a
    prompt pass of the embedded model, 512 tokens on a CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.malloc_trim(0)
            for option in (_KEPT, _MAPPED):
                library.mallopt(*option)
