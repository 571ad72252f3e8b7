"""The gated RMSNorm in one pass on a CPU, float32: torch takes a dozen operations."""

from mamba_eagle.cpu.ops.rms_norm import inverse_rms
from mamba_eagle.cpu.vector_math import silu
from mamba_eagle.machine_code import exactly


@exactly
def gated_group_rms_norm(y, gate, weight, group_size, eps, out):
    """As torch.py's gated_group_rms_norm; y, gate, out [n, size], weight [size]."""
    n, size = y.shape
    for r in range(n):
        for first in range(0, size, group_size):
            last = first + group_size
            part, gates, normed = y[r, first:last], gate[r, first:last], out[r, first:last]
            scales = weight[first:last]
            for c in range(group_size):
                normed[c] = part[c] * silu(gates[c])
            scale = inverse_rms(normed, eps)
            for c in range(group_size):
                normed[c] = normed[c] * scale * scales[c]


@exactly
def head_norm_then_gate(y, gate, weight, eps, out):
    """As layers/ops.py's; y, gate, out [n, heads * P], weight [P]."""
    (n, size), P = y.shape, weight.shape[0]
    for r in range(n):
        for first in range(0, size, P):
            part, gates = y[r, first : first + P], gate[r, first : first + P]
            normed, scale = out[r, first : first + P], inverse_rms(part, eps)
            for c in range(P):
                normed[c] = part[c] * scale * weight[c] * silu(gates[c])
