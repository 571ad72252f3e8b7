"""The tokens that a drafter knows, and the best of them, wherever their logits are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.kernels.top_parts.torch import NO_KEY, token_keys
from mamba_eagle.parallel.vocabulary import Columns


class Shortlist(NamedTuple):
    """Some of a rank's tokens, by their places among those that it has."""

    places: Tensor  # [..., M] int64
    kept: Tensor | None  # [..., M] bool: among the M best of all ranks; None: all are

    def unflatten(self, shape: tuple[int, ...]) -> Shortlist:
        """[n, M] -> [*shape, M]."""
        kept = None if self.kept is None else self.kept.view(*shape, -1)
        return Shortlist(self.places.view(*shape, -1), kept)

    def row(self, d: int) -> Shortlist:
        """Of [b, D, M]: [b, M]."""
        return Shortlist(self.places[:, d], None if self.kept is None else self.kept[:, d])


class DraftVocabulary:
    """V' tokens, a part of the target's V or all. Each rank has the logits of some of them, in the
    order of the ranks.

    The best tokens are those that a single rank finds in all logits, in the same order: keys order
    scores as integers, and of equal ones the lower token comes first. All ranks get them from one
    exchange of k + 1 numbers per row, so what they draft is the same.
    """

    def __init__(self, backend: Backend, columns: Columns, ids: Tensor | None = None) -> None:
        """ids: [V'] int64, the target's token for each; None: they agree."""
        self.backend, self.columns, self.ids = backend, columns, ids
        self.own_ids = None if ids is None else columns.of(ids).contiguous()

    @property
    def is_split(self) -> bool:
        return self.columns.group.size > 1

    def best(self, logits: Tensor, k: int, noise: NoiseKeys | None = None) -> TopTokens:
        """The k best tokens, the target's, and their log-probabilities: logits [b, lanes, own V'],
        any float dtype -> [b, lanes, k]. noise: what the target's sampler will add."""
        backend, ids, lanes = self.backend, self.ids, logits.shape[1]
        if self.is_split:
            own = backend.top_part(logits, self.columns.span.begin, self.own_ids, noise, k)
            return backend.top_of_parts(self.columns.group.gather(own), ids, noise, lanes)
        if noise is not None:
            return backend.top_noisy(logits, ids, noise, k)
        best = backend.top_log_probs(logits.flatten(0, 1), k)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten(logits.shape[:2])

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, on all ranks: [b, lanes, own V'] -> [b, lanes, V']."""
        if not self.is_split:
            return logits
        return self.columns.whole(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])

    def shortlist(self, logits: Tensor, count: int) -> Shortlist:
        """The ``count`` best tokens of each row, those that are this rank's: [n, own V']."""
        own = logits.topk(min(count, logits.shape[1]))
        if not self.is_split:
            return Shortlist(own.indices, None)
        keys = token_keys(own.values.float(), own.indices + self.columns.span.begin)
        padded = keys.new_full((len(keys), count), NO_KEY)
        padded[:, : keys.shape[1]] = keys
        found = self.columns.group.gather(padded).transpose(0, 1).flatten(1)
        last = torch.topk(found, count).values[:, -1:]
        return Shortlist(own.indices, keys >= last)
