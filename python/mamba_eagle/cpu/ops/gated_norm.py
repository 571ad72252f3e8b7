"""The gated RMSNorm in one pass on a CPU, float32: torch takes a dozen operations."""

from __future__ import annotations

from mamba_eagle.cpu.ops.rms_norm import inverse_rms
from mamba_eagle.cpu.vector_math import ZERO, silu
from mamba_eagle.machine_code import kernel


@kernel
def gated_group_rms_norm(y, gate, weight, group_size, eps, out):
    """As torch.py's gated_group_rms_norm; y, gate, out [n, size], weight [size]."""
    n, size = y.shape
    for r in range(n):
        for first in range(0, size, group_size):
            last = first + group_size
            part, gates, normed = y[r, first:last], gate[r, first:last], out[r, first:last]
            scales, squares = weight[first:last], ZERO
            for c in range(group_size):
                gated = part[c] * silu(gates[c])
                normed[c] = gated
                squares += gated * gated
            scale = inverse_rms(squares, group_size, eps)
            for c in range(group_size):
                normed[c] *= scale * scales[c]
