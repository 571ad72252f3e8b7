"""Embeddings: a prompt's hidden states after the final norm, as one vector."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.prefill import PrefillPart


class LastToken:
    """The hidden state of the last token, which has read all others."""

    def add(self, hidden: Tensor) -> None:
        """hidden: [n, hidden_size] of the next n tokens."""
        self._hidden = hidden[-1].float()  # in float32 it is a view of all the chunk's

    def vector(self) -> Tensor:
        """[hidden_size] float32; after the last chunk."""
        return self._hidden


class MeanOfTokens:
    """The mean of all tokens'."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        self._sum = self._sum + hidden.sum(0, dtype=torch.float32)
        self._count += len(hidden)

    def vector(self) -> Tensor:
        assert isinstance(self._sum, Tensor)
        return self._sum / self._count


POOLS: dict[str, type[LastToken | MeanOfTokens]] = {"last": LastToken, "mean": MeanOfTokens}


class Pooling:
    """The prompts whose embeddings are wanted, by request slot."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size  # a feature's first columns, this many, are pooled
        self._open: dict[int, LastToken | MeanOfTokens] = {}

    def admit(self, slot: int, kind: str) -> None:
        """kind: of ``POOLS``; "": no vector is wanted."""
        if kind:
            self._open[slot] = POOLS[kind]()

    def add(self, part: PrefillPart, features: Tensor) -> Tensor | None:
        """A prompt's vector, [hidden_size] float32, if it is wanted and this was its last chunk.

        features: [n, F] of all chunks of the step.
        """
        item = part.item
        if (pool := self._open.get(item.slot)) is None:
            return None
        pool.add(features[part.flat, : self.hidden_size])
        return self._open.pop(item.slot).vector() if item.is_last else None

    def release(self, slots: Sequence[int]) -> None:
        """The requests have left, perhaps before their last chunks."""
        for slot in slots:
            self._open.pop(slot, None)
