"""Rotary position encoding, pair by pair in float64 (RoFormer, arXiv 2104.09864, equation 34).

Channels i and i + half of a head are the two parts of a complex number, which is turned by the
token's angle for pair i:

    out_i + i·out_{i+half} = (x_i + i·x_{i+half}) · (cos + i·sin)

Channels from 2 · half on carry no position and stay as they are. (The paper pairs neighbouring
channels 2i and 2i + 1; published checkpoints store the halves of a head one after the other.)
"""

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [n, heads, D]; cos, sin: [n, 1, half] -> [n, heads, D] float64."""
    out, half = x.double().clone(), cos.shape[2]
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            for i in range(half):
                pair = complex(float(x[token, head, i]), float(x[token, head, i + half]))
                turned = pair * complex(float(cos[token, 0, i]), float(sin[token, 0, i]))
                out[token, head, i], out[token, head, i + half] = turned.real, turned.imag
    return out
