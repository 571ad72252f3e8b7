"""Scans of prompts by fla-core, an optional package of Triton kernels in the chunked WY form.

What a chunk's tokens do to each other and what they read from its first state is computed for all
stretches at once; only the states go from wave to wave.
"""

from __future__ import annotations

import sys

import torch
import triton
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from fla.ops.utils.index import prepare_chunk_indices, prepare_chunk_offsets
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from mamba_eagle.backend.triton.delta_prefill import Bounds, DeltaScan, Keep, Waves
from mamba_eagle.kernels.rms_norm.triton import rms_norm
from mamba_eagle.layers.delta_rule import L2_EPS, DeltaRule
from mamba_eagle.layers.recurrent import Inputs

CHUNK = 64


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
        self._last: tuple[Waves, list[dict[str, Tensor]]] | None = None  # of the layer before

    def _chunks(self, waves: Waves) -> list[dict[str, Tensor]]:
        """Arguments that say where chunks are: of all stretches, then of each wave."""
        if self._last is None or self._last[0] is not waves:
            of_waves = [_chunks(wave.bounds) for wave in waves.each]
            for chunks in of_waves:
                chunks["chunk_offsets"] = prepare_chunk_offsets(chunks["cu_seqlens"], CHUNK)
            self._last = waves, [_chunks(waves.bounds), *of_waves]
        return self._last[1]

    def scan(
        self, layer: DeltaRule, inputs: Inputs, waves: Waves, state: Tensor, keep: Keep
    ) -> Tensor:
        c = layer.config
        q, k, v = inputs.convolved.split([c.key_size, c.key_size, c.inner_size], dim=1)
        g, beta = inputs.gates.split([c.decay_size, c.num_heads], dim=1)
        q, k = self._keys(q, c.state_size)[None], self._keys(k, c.state_size)[None]
        v = v.unflatten(1, (c.num_heads, -1))[None].contiguous()
        given, *of_waves = self._chunks(waves)
        g = chunk_local_cumsum(g[None].contiguous(), CHUNK, scale=RCP_LN2, **given)
        own = {"g": g, "beta": beta[None].contiguous(), "chunk_size": CHUNK}
        w, u, _ = chunk_gated_delta_rule_fwd_intra(k, v, **own, **given)
        firsts, values = [], []  # states that chunks begin with; what their tokens write
        for wave, chunks in zip(waves.each, of_waves):
            span = slice(wave.first, wave.end)
            first, value, state = chunk_gated_delta_rule_fwd_h(
                *(part[:, span] for part in (k, w, u, g)),
                initial_state=state[: wave.requests],
                output_final_state=True,
                state_v_first=True,
                chunk_size=CHUNK,
                **chunks,
            )
            keep(state, wave.saves)
            firsts.append(first)
            values.append(value)
        value, first = (
            torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] for parts in (values, firsts)
        )
        y = chunk_fwd_o(q, k, value, first, g, state_v_first=True, **given)
        return y[0].flatten(1)

    def _keys(self, flat: Tensor, size: int) -> Tensor:
        """[n, G·size] -> [n, G, size], of length 1."""
        if size not in self._even:
            self._even[size] = torch.full((size,), size**-0.5, device=flat.device)
        rows = flat.reshape(-1, size)
        return rms_norm(rows, self._even[size], L2_EPS / size).view(len(flat), -1, size)


def _chunks(bounds: Bounds) -> dict[str, Tensor]:
    indices = prepare_chunk_indices(bounds.device, CHUNK, cu_seqlens_cpu=bounds.host)
    return {"cu_seqlens": bounds.device, "chunk_indices": indices}
