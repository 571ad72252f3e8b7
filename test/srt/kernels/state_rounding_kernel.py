"""A kernel that does nothing but round states (needs triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from mamba_eagle.kernels.state_rounding.triton import round_state


@triton.jit
def round_kernel(states, tokens, out, size, layer, BLOCK: tl.constexpr):
    """states [n, size] float32, tokens [n] -> out [n, size]."""
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    values = tl.load(states + row * size + place, mask=inside)
    rounded = round_state(values, tl.load(tokens + row), layer, place, out.dtype.element_ty)
    tl.store(out + row * size + place, rounded, mask=inside)
