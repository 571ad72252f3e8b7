"""Scans of prompts by fla-core, an optional package of Triton kernels in the chunked WY form.

What a chunk's tokens do to each other and what they read from its first state is its. The walk from
state to state is ours: the package's has no float32 states inside of a sequence, and a launch for
each of 32 saved states made two thirds of a long prompt's time.
"""

from __future__ import annotations

import sys

import torch
import triton
from fla.ops.common.chunk_o import chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.index import prepare_chunk_indices
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from mamba_eagle.backend.triton.delta_prefill import DeltaScan, Stretches
from mamba_eagle.kernels.delta_rule.triton_states import CHUNK, states
from mamba_eagle.kernels.rms_norm.triton import rms_norm
from mamba_eagle.layers.delta_rule import L2_EPS, DeltaRule
from mamba_eagle.layers.recurrent import Inputs


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
        self._last: tuple[Stretches, dict[str, Tensor]] | None = None  # of the layer before

    def _chunks(self, stretches: Stretches) -> dict[str, Tensor]:
        """Arguments that say where chunks are."""
        if self._last is None or self._last[0] is not stretches:
            bounds = stretches.bounds
            indices = prepare_chunk_indices(bounds.device, CHUNK, cu_seqlens_cpu=bounds.host)
            self._last = stretches, {"cu_seqlens": bounds.device, "chunk_indices": indices}
        return self._last[1]

    def scan(
        self, layer: DeltaRule, inputs: Inputs, stretches: Stretches, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        c = layer.config
        q, k, v = inputs.convolved.split([c.key_size, c.key_size, c.inner_size], dim=1)
        g, beta = inputs.gates.split([c.decay_size, c.num_heads], dim=1)
        q, k = self._keys(q, c.state_size)[None], self._keys(k, c.state_size)[None]
        v = v.unflatten(1, (c.num_heads, -1))[None].contiguous()
        given = self._chunks(stretches)
        g = chunk_local_cumsum(g[None].contiguous(), CHUNK, scale=RCP_LN2, **given)
        own = {"g": g, "beta": beta[None].contiguous(), "chunk_size": CHUNK}
        w, u, _ = chunk_gated_delta_rule_fwd_intra(k, v, **own, **given)
        where = stretches.starts, stretches.ends, stretches.chunks
        first, value, ends = states(k[0], w[0], u[0], g[0], state, where, stretches.requests[-1])
        y = chunk_fwd_o(q, k, value[None], first[None], g, state_v_first=True, **given)
        return y[0].flatten(1), ends

    def _keys(self, flat: Tensor, size: int) -> Tensor:
        """[n, G·size] -> [n, G, size], of length 1."""
        if size not in self._even:
            self._even[size] = torch.full((size,), size**-0.5, device=flat.device)
        rows = flat.reshape(-1, size)
        return rms_norm(rows, self._even[size], L2_EPS / size).view(len(flat), -1, size)
