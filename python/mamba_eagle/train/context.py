"""The sequence side of training passes, in mixed precision.

The recurrence runs outside of autocast, which would round its sums to bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.ssd.torch import ssd_chunked
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.mamba2 import Mamba2Mixer


def shift(x: Tensor, by: int) -> Tensor:
    """Moves [batch, length, ...] later by ``by`` places, or earlier if it is negative; zeros enter
    where nothing came from."""
    length = x.shape[1]
    pad = [0, 0] * (x.ndim - 2)
    if by < 0:
        return F.pad(x[:, -by:], [*pad, 0, min(-by, length)])
    return F.pad(x[:, : max(length - by, 0)], [*pad, min(by, length), 0])


def convolve(layer: Mamba2Mixer, raws: list[Tensor]) -> Tensor:
    """The causal convolution and SiLU of the last step's inputs, in float32.

    A sum of shifted products, because the backward pass of a depthwise ``conv1d`` is many times
    slower on a GPU.

    Args: raws: [batch, length, channels] of each unrolled step. k places back from an input of step
        j stands one of step j - k, and from the first step on one of the first step.
    """
    weight, step = layer.conv1d.weight[:, 0].float(), len(raws) - 1  # [channels, K]
    width = weight.shape[1]
    out = raws[step] * weight[:, width - 1]
    for back in range(1, width):
        before = shift(raws[max(step - back, 0)], back)
        out = torch.addcmul(out, before, weight[:, width - 1 - back])
    return F.silu(out if layer.conv1d.bias is None else out + layer.conv1d.bias)


class TrainingContext(FullSequenceContext):
    """Whole sequences, one pass."""

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        with torch.autocast(xbc.device.type, enabled=False):
            xbc = xbc.float().unflatten(0, (self.batch, self.length))
            dt = layer.step_size(dt).unflatten(0, (self.batch, self.length))
            x, B, C = layer.split_xbc(convolve(layer, [xbc]))
            y = ssd_chunked(x, dt, layer.decay_rate(), B, C, layer.D, layer.config.chunk_size).y
            return y.flatten(2).flatten(0, 1)


class Scanned(NamedTuple):
    """What one step feeds into a recurrence."""

    xbc: Tensor  # [b, l, channels], before the convolution
    x: Tensor  # [b, l, H, P]
    B: Tensor  # [b, l, H, N], of each head
    dt: Tensor  # [b, l, H], after softplus


class UnrolledContext(FullSequenceContext):
    """``batch`` sequences of ``length`` tokens in which each position drafts, all at once.

    Step 0 runs the true entries, those that a drafter makes from the target's own features. Step j
    runs, at every position p, the entry that is drafted there j tokens after the last true one: its
    history is the true entries up to p - j, then the entry of step i at p - j + i for i = 1 … j.
    Steps come in order, and each calls a layer once. Differentiable; tokens are flat in the layers.
    """

    def __init__(self, batch: int, length: int, device: torch.device | None = None) -> None:
        super().__init__(batch, length, device)
        self._kv: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: of each step
        self._scanned: dict[int, list[Scanned]] = {}

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (t.unflatten(0, (self.batch, self.length)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))  # [b, heads, l, D]
        entries = self._kv.setdefault(layer.index, [])
        entries.append((k, v))
        step = len(entries) - 1
        if step == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
        else:
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*entries))
            mask = self._visible(step, q.device)
            out = F.scaled_dot_product_attention(q, keys, values, mask, scale=layer.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _visible(self, step: int, device: torch.device) -> Tensor:
        """[l, (step + 1) * l] bool: what a query sees of the keys of all steps, side by side."""
        place = torch.arange(self.length, device=device)
        behind = place[:, None] - place[None, :]  # [query, key]
        own = [behind == step - i for i in range(1, step + 1)]
        return torch.cat([behind >= step, *own], dim=1)

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        with torch.autocast(xbc.device.type, enabled=False):  # its sums stay in float32
            return self._mamba(layer, xbc.float(), dt.float())

    def _mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """The state that step j starts from is the true one after p - j. It is never built: what C
        reads of it is a scan over the true entries in which C stands j places earlier. The j
        drafted entries are added one by one, each decayed to p."""
        xbc, dt = (t.unflatten(0, (self.batch, self.length)) for t in (xbc, dt))
        entries = self._scanned.setdefault(layer.index, [])
        step = len(entries)
        raws = [entry.xbc for entry in entries] + [xbc]
        x, B, C = layer.split_xbc(convolve(layer, raws))
        heads = x.shape[2] // B.shape[2]
        now = Scanned(xbc, x, B.repeat_interleave(heads, 2), layer.step_size(dt))
        entries.append(now)
        A, D = layer.decay_rate(), layer.D
        first, chunk = entries[0], layer.config.chunk_size
        if step == 0:
            y = ssd_chunked(x, now.dt, A, B, C, D, chunk).y
            return y.flatten(2).flatten(0, 1)

        C = C.repeat_interleave(heads, 2)  # [b, l, H, N]
        nothing = torch.zeros_like(D)
        read = ssd_chunked(first.x, first.dt, A, first.B, shift(C, -step), nothing, chunk).y
        log_decay = torch.zeros_like(now.dt)  # from behind the entry at hand to p
        y = D[:, None] * x
        for i in range(step, 0, -1):
            entry_x, entry_B, entry_dt = (
                shift(t, step - i) for t in (entries[i].x, entries[i].B, entries[i].dt)
            )
            share = log_decay.exp() * entry_dt * (entry_B * C).sum(-1)  # [b, l, H]
            y = y + share[..., None] * entry_x
            log_decay = log_decay + entry_dt * A
        y = y + log_decay.exp()[..., None] * shift(read, step)
        return y.flatten(2).flatten(0, 1)
