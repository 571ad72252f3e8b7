"""Scans of prompts by fla-core, an optional package of Triton kernels in the chunked WY form."""

from __future__ import annotations

import sys

import torch
import triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from mamba_eagle.backend.triton.delta_prefill import Bounds, DeltaScan
from mamba_eagle.kernels.rms_norm.triton import rms_norm
from mamba_eagle.layers.delta_rule import L2_EPS, DeltaRule
from mamba_eagle.layers.recurrent import Inputs, Scanned


def settle() -> None:
    """Leave each kernel of the package one of the forms that it would try at its first launch: to
    build and to time all of them takes minutes of a first start, and the fastest one differs from
    start to start."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla.ops"):
            continue
        for kernel in list(vars(module).values()):
            while not isinstance(kernel, Autotuner) and hasattr(kernel, "fn"):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner):
                kernel.configs = [min(kernel.configs, key=_distance)]


def _distance(config: triton.Config) -> tuple[int, ...]:
    """From tiles of 64, or of 32 values of a state, with 4 warps and 3 stages."""
    blocks = {"BK": 64, "BV": 64} if "BK" in config.kwargs else {"BV": 32}
    sizes = [abs(config.kwargs.get(name, size) - size) for name, size in blocks.items()]
    return sum(sizes), abs(config.num_warps - 4), abs((config.num_stages or 3) - 3)


class FlaScan(DeltaScan):
    """All sequences at once, of rules with one decay per head. Decays and states are float32; keys,
    what the chunks write and the states between chunks have the model's dtype.

    Norms are ours: those of the package are tuned again for every few thousand tokens.
    """

    def __init__(self) -> None:
        settle()
        self._even: dict[int, Tensor] = {}  # by size: a norm's weight for rows of length 1

    def scan(self, layer: DeltaRule, inputs: Inputs, bounds: Bounds, state: Tensor) -> Scanned:
        c = layer.config
        q, k, v = inputs.convolved.split([c.key_size, c.key_size, c.inner_size], dim=1)
        g, beta = inputs.gates.split([c.decay_size, c.num_heads], dim=1)
        heads = (self._keys(q, c.state_size), self._keys(k, c.state_size))
        given = (*heads, v.unflatten(1, (c.num_heads, -1)), g, beta)
        y, after = chunk_gated_delta_rule(
            *(part[None] for part in given),
            initial_state=state,
            output_final_state=True,
            state_v_first=True,
            cu_seqlens=bounds.device,
            cu_seqlens_cpu=bounds.host,
        )
        return Scanned(y[0].flatten(1), after)

    def _keys(self, flat: Tensor, size: int) -> Tensor:
        """[n, G·size] -> [n, G, size], of length 1."""
        if size not in self._even:
            self._even[size] = torch.full((size,), size**-0.5, device=flat.device)
        rows = flat.reshape(-1, size)
        return rms_norm(rows, self._even[size], L2_EPS / size).view(len(flat), -1, size)
