"""Blocks that a drafter proposes from many positions of an answer at once, in training.

Shapes: b answers of length l, A anchors in each, N rows per block, n = b * A * N rows; H query
heads, kv of keys, D channels each; L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mamba_eagle.layers.block_attention import BlockAttention, block_mask
from mamba_eagle.layers.context import Rotation


class BlockTrainingContext:
    """A row sees the features of its own answer before its anchor, and its own block; never another
    block. So one pass gives what a drafter would propose from each anchor."""

    rotation: Rotation | None = None

    def __init__(self, anchors: Tensor, rows: int, keys: Tensor, values: Tensor) -> None:
        """anchors: [b, A] int64, -1 where there is none; rows: N.
        keys, values: [L, b, l, kv, D], of the answers' features."""
        self.anchors, self.rows = anchors, rows
        self.keys, self.values = keys, values
        offsets = torch.arange(rows, device=anchors.device)
        self.row_positions = anchors.clamp(min=0)[..., None] + offsets  # [b, A, N]
        self._masks: dict[int, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """[n] int64"""
        return self.row_positions.flatten()

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        return None

    def attention(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, D], k and v [n, kv, D] -> [n, H, D]."""
        (b, A), N, kv = self.anchors.shape, self.rows, k.shape[1]
        q = q.view(b, A, N, kv, -1, q.shape[2]).permute(0, 3, 4, 1, 2, 5)  # [b, kv, G, A, N, D]
        k, v = (x.view(b, A, N, kv, -1).permute(0, 3, 1, 2, 4) for x in (k, v))  # [b, kv, A, N, D]
        keys, values = (x[layer.index].to(q.dtype) for x in (self.keys, self.values))
        before = torch.einsum("bkgand,bskd->bkgans", q, keys)
        own = torch.einsum("bkgand,bkamd->bkganm", q, k)
        seen = block_mask(N, layer.window, layer.causal, q.device)
        parts = [
            (before.float() * layer.scale).masked_fill_(~self._sees(layer.window), -torch.inf),
            (own.float() * layer.scale).masked_fill_(~seen, -torch.inf),
        ]
        if layer.attention_sink_bias is not None:
            sinks = layer.attention_sink_bias.float().view(1, kv, -1, 1, 1, 1)
            parts.append(sinks.expand(*own.shape[:-1], 1))
        shares = torch.cat(parts, dim=-1).softmax(-1).to(v.dtype)
        length = before.shape[-1]
        out = torch.einsum("bkgans,bskd->bkgand", shares[..., :length], values)
        of_block = shares[..., length : length + N]
        out = out + torch.einsum("bkganm,bkamd->bkgand", of_block, v)
        return out.permute(0, 3, 4, 1, 2, 5).reshape(b * A * N, -1, q.shape[-1])

    def _sees(self, window: int) -> Tensor:
        """Which features each row sees: [b, 1, 1, A, N or 1, l] bool."""
        if window not in self._masks:
            place = torch.arange(self.keys.shape[2], device=self.anchors.device)
            sees = (place < self.anchors[..., None])[:, :, None]  # [b, A, 1, l]
            if window:
                sees = sees & (self.row_positions[..., None] - place < window)
            self._masks[window] = sees[:, None, None]
        return self._masks[window]
