"""Attention of a drafted block to the tokens before it and to itself."""

import torch
from torch import Tensor, nn

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import Rotation
from mamba_eagle.model_config import AttentionConfig
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard, attention_heads


class BlockAttention(Attention):
    """The rows of a block see each other and the context, which consists of keys and values alone.

    ``window``: a row sees positions less than this far from its own; 0: all. ``causal``: a row sees
    no later one. ``attention_sink_bias`` [heads]: a logit per query head that takes part in the
    softmax and has no value; None: there is none.
    """

    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        index: int,
        norm_eps: float,
        window: int = 0,
        causal: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__(config, hidden_size, index, norm_eps)
        self.window, self.causal = window, causal
        zeros = torch.zeros(config.num_heads) if sinks else None
        self.attention_sink_bias = None if zeros is None else nn.Parameter(zeros)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        sinks = rows(attention_heads(shard, self.config).heads)
        return {**super().cuts(shard), "attention_sink_bias": sinks}

    def context_kv(self, context: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values of context features [n, hidden_size]: both [n, kv_heads, D]. Not to be
        called once the layer is prepared."""
        k, v = (
            projection(context).unflatten(-1, (-1, self.config.head_dim))
            for projection in (self.k_proj, self.v_proj)
        )
        k = self.k_norm(k.reshape(-1, k.shape[-1])).view(k.shape)
        return self._ops.rotate(k, *rotation), v


def block_mask(rows: int, window: int, causal: bool, device: torch.device | None = None) -> Tensor:
    """Which rows of a block each of them sees: [rows, rows] bool."""
    index = torch.arange(rows, device=device)
    ahead = index[None, :] - index[:, None]
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen & (ahead.abs() < window) if window else seen
