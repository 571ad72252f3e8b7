"""Lets a drafter's network see what grammars allow, on a CPU.

The masks that it asks for are those of the nodes that will be verified, mostly; each is computed
once (``RequestGrammar`` keeps them until its request goes on).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.drafting.base import KeyedNoise
from mamba_eagle.runner.constraints import Constraints
from mamba_eagle.tree.candidates import Frontier

Path = tuple[int, ...]  # drafted tokens


class GrammarGuide(KeyedNoise):
    """Log-probabilities among the tokens that may follow a lane, after those of ``noise``.

    A forced token has probability 1 then, and so it is in the tree.
    """

    def __init__(
        self,
        constraints: Constraints,
        slots: Sequence[int],
        noise: KeyedNoise | None,
        backend: Backend,
    ) -> None:
        self.noise, self.backend = noise, backend
        self.grammars = [constraints.grammar(slot) for slot in slots]
        self.paths: list[list[Path]] = [[()] for _ in slots]  # of each request's lanes

    def __call__(self, log_probs: Tensor, positions: Tensor) -> Tensor:
        if self.noise is not None:
            log_probs = self.noise(log_probs, positions)
        b, lanes, vocab = log_probs.shape
        if len(self.paths[0]) != lanes:
            return log_probs  # their tokens are not known
        rows, masks = [], []
        for i, grammar in enumerate(self.grammars):
            if grammar is None:
                continue
            for lane, path in enumerate(self.paths[i]):
                mask = grammar.mask_behind(path)
                if mask is not None:
                    rows.append(i * lanes + lane)
                    masks.append(mask)
        if not rows:
            return log_probs
        flat, index = log_probs.reshape(b * lanes, vocab), torch.tensor(rows)
        bits = torch.from_numpy(np.stack(masks).view(np.int32))
        left = self.backend.mask_logits(flat, index, bits)[index].log_softmax(-1)
        return flat.index_copy(0, index, left).view_as(log_probs)

    def follow(self, frontier: Frontier) -> None:
        tokens, lanes = frontier.tokens.tolist(), frontier.lanes.tolist()
        self.paths = [
            [(*above[lane], token) for lane, token in zip(*own, strict=True)]
            for above, *own in zip(self.paths, lanes, tokens, strict=True)
        ]
