"""Scans of prompts by fla-core, an optional package of Triton kernels in the chunked WY form.

What a chunk's tokens do to each other is its, and what they read where our walk does not say it.
Ours are what chunks are made of, in the convolution's launch and one of gates, not eight, and the
walk from state to state: the package's has no float32 states inside of a sequence, and a launch for
each of 32 saved states made two thirds of a long prompt's time.
"""

import sys
from typing import Any

import torch
import triton
from fla.ops.common.chunk_o import chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from mamba_eagle.backend.triton.delta import chunk_gates_of
from mamba_eagle.backend.triton.delta_prefill import DeltaScan, Stretches
from mamba_eagle.kernels.causal_conv.triton_prefill import Keys, conv_heads
from mamba_eagle.kernels.delta_rule import gluon_prompts as hopper
from mamba_eagle.kernels.delta_rule.triton_states import CHUNK, states
from mamba_eagle.kernels.prefill_plan import CONV_TOKENS, PrefillPlan
from mamba_eagle.layers.delta_rule import L2_EPS, DeltaRule


def settle() -> None:
    """Leave each kernel of the package one of the forms that it would try at its first launch: to
    build and to time all of them takes minutes of a first start, and the fastest one differs from
    start to start."""
    for place, module in list(sys.modules.items()):
        if not place.startswith("fla.ops"):
            continue
        for name, kernel in list(vars(module).items()):
            while not isinstance(kernel, Autotuner) and hasattr(kernel, "fn"):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner):
                # of tiles of 16, which are not divided between warps: 349 µs in place of 648
                warps = 1 if name == "chunk_gated_delta_rule_fwd_kkt_solve_kernel" else 4
                kernel.configs = [min(kernel.configs, key=lambda each: _distance(each, warps))]


def _distance(config: triton.Config, warps: int) -> tuple[int, ...]:
    """From tiles of 64, or of 32 values of a state, with 3 stages."""
    blocks = {"BK": 64, "BV": 64} if "BK" in config.kwargs else {"BV": 32}
    sizes = [abs(config.kwargs.get(name, size) - size) for name, size in blocks.items()]
    return sum(sizes), abs(config.num_warps - warps), abs((config.num_stages or 3) - 3)


class FlaScan(DeltaScan):
    """All sequences at once, of rules with one decay per head. Decays and states are float32; keys,
    what the chunks write and the states between chunks have the model's dtype."""

    block = 2 * CONV_TOKENS  # of one head a program; others have twice the channels

    def __init__(self) -> None:
        settle()
        self._inverses: tuple[Stretches, Tensor] | None = None  # of the layer before

    def convolved(
        self, layer: DeltaRule, channels: Tensor, history: Tensor, plan: PrefillPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys = Keys(layer.config.num_groups, layer.config.state_size, L2_EPS)
        q, k, v = conv_heads(channels, *layer.taps(), history, plan, keys)
        return q, k, v.unflatten(1, (layer.config.num_heads, -1))

    def scan(
        self, layer: DeltaRule, convolved: Any, raw: Tensor, stretches: Stretches, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        made = *convolved, *chunk_gates_of(layer, raw, stretches.starts, CHUNK)
        q, k, v, g, beta = (each[None] for each in made)
        given = {"cu_seqlens": stretches.on_device, "chunk_indices": stretches.places}
        inverses = self._inverted(k, g, beta, stretches, given)
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverses, g=g, **given)
        where = stretches.starts, stretches.ends, stretches.chunks
        walk = k[0], w[0], u[0], g[0], state, where, stretches.requests[-1]
        if hopper.supports(u[0], layer.config.state_size):
            y, ends = hopper.walk(q[0], *walk)
            return y.flatten(1), ends
        first, value, ends = states(*walk)
        y = chunk_fwd_o(q, k, value[None], first[None], g, state_v_first=True, **given)
        return y[0].flatten(1), ends

    def _inverted(
        self, k: Tensor, g: Tensor, beta: Tensor, stretches: Stretches, given: dict[str, Tensor]
    ) -> Tensor:
        """(I + A)⁻¹ of all chunks, lower triangles. The kernel writes the same places in all layers
        of a pass, so zeros are written once, and not in each layer as by the package."""
        (_, n, groups, size), heads = k.shape, beta.shape[2]
        shape, last = (1, n, heads, CHUNK), self._inverses
        if last is None or last[0] is not stretches or last[1].shape != shape:
            last = stretches, torch.zeros(shape, dtype=k.dtype, device=k.device)
            self._inverses = last
        sizes = {"T": n, "H": groups, "HV": heads, "K": size, "BT": CHUNK, "BC": CHUNK // 4}
        grid = len(stretches.places), heads
        chunk_gated_delta_rule_fwd_kkt_solve_kernel[grid](
            k=k, g=g, beta=beta, A=last[1], **given, **sizes
        )
        return last[1]
