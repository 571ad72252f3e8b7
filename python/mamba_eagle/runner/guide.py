"""Lets a drafter's network see what grammars allow, on a CPU.

It asks for a mask where the network's own best token is refused. Elsewhere the network knows how
the text goes on, as within free text, and a mask would cost more than it gains. Each is computed
once: ``RequestGrammar`` keeps it until its request goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mamba_eagle.drafting.base import KeyedNoise
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy.torch import whole_log_probs
from mamba_eagle.runner.constraints import Constraints
from mamba_eagle.runner.sampler import BatchNoise, SamplingState
from mamba_eagle.tree.candidates import Frontier

Path = tuple[int, ...]  # drafted tokens


def is_narrow(mask: npt.NDArray[np.uint32]) -> bool:
    """Whether it forbids so much that a drafter would often be wrong: most words of it are empty.
    Within a string of JSON most tokens are allowed, and the drafter is as good as without."""
    return 2 * np.count_nonzero(mask) < len(mask)


class GrammarGuide(KeyedNoise):
    """Log-probabilities among the tokens that may follow a lane, after those of ``noise``.

    A forced token has probability 1 then, and so it is in the tree.
    """

    def __init__(
        self,
        constraints: Constraints,
        slots: Sequence[int],
        sampling: SamplingState,
        noise: BatchNoise | None,
    ) -> None:
        self.noise, self.backend, self.vocab_size = noise, sampling.backend, sampling.vocab_size
        self.grammars = [constraints.grammar(slot) for slot in slots]
        self.paths: list[list[Path]] = [[()] for _ in slots]  # of each request's lanes
        self.followed = True  # the lanes are those of the next call

    def best(self, logits: Tensor, ids: Tensor | None, positions: Tensor, k: int) -> TopTokens:
        log_probs = whole_log_probs(logits, ids, self.vocab_size)
        if self.noise is not None:
            log_probs = self.noise.noisy(log_probs, positions)
        best = self.backend.top_of(self._guided(log_probs).flatten(0, 1), k)
        return best.unflatten(logits.shape[:2])

    def _guided(self, log_probs: Tensor) -> Tensor:
        """[b, lanes, V] -> the same, those of forbidden tokens -inf where a mask is worth it."""
        b, lanes, vocab = log_probs.shape
        if not self.followed:
            return log_probs  # the drafter's lanes have no tokens, or it does not tell them
        self.followed = False
        rows, masks = [], []
        best = log_probs.argmax(-1).tolist()
        for i, grammar in enumerate(self.grammars):
            if grammar is None:
                continue
            for lane, path in enumerate(self.paths[i]):
                if grammar.allows_behind(path, best[i][lane]):
                    continue
                mask = grammar.mask_behind(path)
                if mask is not None and is_narrow(mask):
                    rows.append(i * lanes + lane)
                    masks.append(mask)
        if not rows:
            return log_probs
        flat, index = log_probs.reshape(b * lanes, vocab), torch.tensor(rows)
        bits = torch.from_numpy(np.stack(masks).view(np.int32))
        left = self.backend.mask_logits(flat[index], torch.arange(len(rows)), bits)
        # NaN: the drafter knows none of the tokens that are allowed
        left = left.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return flat.index_copy(0, index, left).view_as(log_probs)

    def follow(self, frontier: Frontier) -> None:
        self.followed = True
        tokens, lanes = frontier.tokens.tolist(), frontier.lanes.tolist()
        self.paths = [
            [(*above[lane], token) for lane, token in zip(*own, strict=True)]
            for above, *own in zip(self.paths, lanes, tokens, strict=True)
        ]
