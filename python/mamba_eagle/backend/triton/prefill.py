"""Prompt chunks on a GPU: two kernels per layer for all chunks, without waiting."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.backend.prefill import FixedRecurrence, PrefillContext, PrefillPart, prompt_of
from mamba_eagle.backend.triton.layer import conv_weights, sizes_of
from mamba_eagle.kernels.causal_conv.triton_prefill import prefill_conv
from mamba_eagle.kernels.prefill_plan import CONV_TOKENS, PrefillPlan, Room, prefill_plan
from mamba_eagle.kernels.ssd.triton import scan


class PlannedPrefill(PrefillContext):
    """What kernels read of all layers is made once."""

    block = CONV_TOKENS

    @cached_property
    def plan(self) -> PrefillPlan:
        prompts = [prompt_of(part) for part in self.parts]
        return prefill_plan(prompts, self.place.to_device, self.block)

    def fixed(self, tokens: int, requests: int) -> FixedRecurrence | None:
        return None if self.pool.rounding.keyed else FixedPlan(self, tokens, requests)


SEGMENTS = 4  # of a request, for which a fixed plan has room


class FixedPlan:
    """A context's recurrence by a plan that stays where it is."""

    def __init__(self, ctx: PlannedPrefill, tokens: int, requests: int) -> None:
        self.ctx, self.tokens = copy(ctx), tokens
        blocks = -(-tokens // CONV_TOKENS) + requests - 1
        self.room = Room(requests, SEGMENTS * requests, blocks)
        self.memory: Tensor | None = None
        self.show(ctx.parts)
        self.recur = self.ctx.recur

    def fits(self, parts: Sequence[PrefillPart]) -> bool:
        segments = sum(len(part.item.saves) + 1 for part in parts)
        return len(parts) <= self.room.requests and segments <= self.room.segments

    def show(self, parts: Sequence[PrefillPart]) -> None:
        plan = prefill_plan([prompt_of(part) for part in parts], self._sent, room=self.room)
        self.ctx.plan = plan._replace(tokens=self.tokens)

    def _sent(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        place = self.ctx.place
        if self.memory is None:
            self.memory = place.to_device(numbers, dtype)
        return self.memory.copy_(place.host_tensor(numbers, dtype), non_blocking=True)


class TritonPrefillContext(PlannedPrefill):
    """Mamba2."""

    @cached_property
    def keys(self) -> Tensor | None:
        return self.round_keys(self.plan.ends)

    def _recur(self, layer: Any, xbc: Tensor, dt: Tensor) -> Tensor:
        i, weights, sizes = layer.index, conv_weights(layer), sizes_of(layer.config)
        x, dt, B, C = prefill_conv(xbc, dt, weights, self.pool.conv[i], self.plan, sizes)
        state, keys = self.pool.ssm[i], self.keys
        return scan(x, dt, weights.A, B, C, layer.D, state, self.plan, round_keys=keys, layer=i)
