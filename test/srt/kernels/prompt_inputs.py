"""Prompts whose attention is compared with torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.backend.attention import PromptSpan
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.torch.attention import CausalAttention
from mamba_eagle.model_config import AttentionConfig

ATTENTION = AttentionConfig(num_heads=10, num_kv_heads=2, head_dim=64, bias=False)
SPANS = [PromptSpan(2, 0, 9), PromptSpan(0, 7, 1), PromptSpan(3, 30, 13)]


class Inputs:
    """Two equal pools of two layers, a slot table over them, and a layer."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        attention: AttentionConfig,
        stored_as: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pools = []
        for _ in range(2):
            pool = KVPool(2, 400, attention, dtype, torch.device(device), stored_as=stored_as)
            self.pools.append(pool)
        for part in ("k", "v"):
            values = torch.randn(getattr(pool, part).shape, generator=generator)
            for pool in self.pools:
                getattr(pool, part).copy_(values)
        order = torch.randperm(400, generator=generator)
        self.table = order[:320].view(4, 80).to(device)
        self.layer: Any = SimpleNamespace(index=1, scale=0.2)
        self.attention, self.generator = attention, generator

    def tokens(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as views of one product."""
        c, pool = self.attention, self.pools[0]
        heads = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        packed = torch.randn(n, sum(heads), c.head_dim, generator=self.generator).to(
            pool.k.device, pool.dtype
        )
        q, k, v = packed.split(heads, dim=1)
        return q, k, v

    def check(self, found: Any) -> None:
        """That attention of SPANS in the first pool gives what torch's gives in the second."""
        tokens = self.tokens(sum(span.length for span in SPANS))
        ours, reference = self.pools
        wanted = CausalAttention(reference, self.table, SPANS)
        for self.layer.index in range(2):
            pair = found.attend(self.layer, *tokens), wanted.attend(self.layer, *tokens)
            error = (pair[0].double() - pair[1].double()).norm() / pair[1].double().norm()
            assert error < (1e-5 if tokens[0].dtype == torch.float32 else 1e-2)
        for pair in zip(ours.bits, reference.bits):
            assert torch.equal(*pair)
