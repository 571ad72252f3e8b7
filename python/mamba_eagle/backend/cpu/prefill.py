"""Prompt chunks on a CPU in float32: three fused calls per layer for all requests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention
from mamba_eagle.backend.cpu.state import layer_weights
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart, prompt_of
from mamba_eagle.kernels.causal_conv.cpu import convolve_prompts, save_histories, step_sizes
from mamba_eagle.kernels.prefill_plan import prefill_plan
from mamba_eagle.kernels.ssd.cpu import CHUNK, SLACK, products, scan
from mamba_eagle.layers.mamba2 import Mamba2Mixer

SOFTPLUS = 100  # multiply-adds that take about as long


class CpuPrefillContext(PrefillContext):
    """The kernels read the initial state from the state slot that holds it; only the feature is
    copied."""

    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        paged: NewTokenAttention | None,
        place: Place,
    ) -> None:
        """pool: in float32."""
        super().__init__(parts, paged, place)
        self.pool = pool
        for part in parts:
            if part.item.is_first:
                pool.begin_feature(part.item)
        plan = prefill_plan([prompt_of(part) for part in parts])
        self.requests, self.segments, self.blocks = (table.numpy() for table in plan[:3])
        self.block = plan.block
        self.chunks = chunks_of(self.segments)

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        n, c = xbc.shape[0], layer.config
        raw, weights = xbc.contiguous().numpy(), layer_weights(layer)
        history, state = (part[layer.index].numpy() for part in (self.pool.conv, self.pool.ssm))
        places = (self.requests, self.segments)
        xBC, y = torch.empty(n + SLACK, xbc.shape[1]).numpy(), torch.empty(n, c.inner_size)
        convolve_prompts(
            xbc.numel() * c.conv_kernel * 4,  # with the exponential of the gate
            *(raw, weights.conv, history, *places, self.blocks, self.block, xBC),
        )
        save_histories(raw, history, *places)
        scores = np.empty((n, c.num_groups, CHUNK), np.float32)
        products(
            n * c.num_groups * c.state_size * CHUNK // 2,
            *(xBC, c.inner_size, c.state_size, self.chunks, scores),
        )
        A, bias, D = weights.heads
        steps = np.empty((n, c.num_heads), np.float32)
        step_sizes(steps.size * SOFTPLUS, dt.numpy(), bias, weights.low, weights.high, steps)
        scan(
            n * c.inner_size * (2 * c.state_size + CHUNK // 2),
            *(xBC, steps, A, D, state),
            *(*places, scores, y.numpy()),
        )
        return y


def chunks_of(segments: np.ndarray) -> np.ndarray:
    """The chunks that segments [S, 3] consist of: [c, 2], first token and end of each."""
    chunks = [
        (at, min(at + CHUNK, end))
        for begin, end, _ in segments.tolist()
        for at in range(begin, end, CHUNK)
    ]
    return np.array(chunks, np.int64).reshape(-1, 2)
