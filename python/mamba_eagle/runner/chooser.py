"""Who turns logits into tokens: one rank alone, or ranks that each have a part of the vocabulary.

Whatever the ranks go on with is the result of an exchange: the target's tokens, and the drafted
trees. Ranks that computed either for themselves could differ in one token, and would then wait for
each other for ever. Shapes as in sampler.py.
"""

import torch
from torch import Tensor

from mamba_eagle.backend.token_ops import TokenLogprobs
from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.top_parts.torch import LOW_BITS, score_of
from mamba_eagle.parallel.groups import ALONE, Channel, Group, sum_in_order
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.runner.constraints import TokenMasks
from mamba_eagle.runner.sampler import (
    ADJUSTMENTS,
    CHOICES,
    Requests,
    Scored,
    apply,
    nodes_of,
    sample_in_kernels,
)
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.tree.tree import Tree


class Chooser:
    """One rank, which has all logits; the other pipeline stages learn what it chooses."""

    def __init__(self, state: SamplingState, group: Group = ALONE, stages: Group = ALONE) -> None:
        """group: the ranks that share the vocabulary."""
        self.state, self.place = state, state.backend.place
        self.group, self.columns = group, Columns(group, state.vocab_size)
        self.stages = stages

    def sample(self, nodes: Scored, allowed: TokenMasks | None = None) -> Tensor:
        """The target's token at every node. allowed: what the grammars of constrained requests
        leave.

        Returns [b, T] int64; NO_TOKEN at nodes where no token can be sampled because logits are not
        finite or all tokens are banned.
        """
        target = self._sampled(nodes, allowed)
        return self.stages.from_last(target.contiguous(), Channel.TOKENS)

    def _sampled(self, nodes: Scored, allowed: TokenMasks | None) -> Tensor:
        """As ``sample``, on the last stage."""
        state, (slots, logits, positions, tree) = self.state, nodes
        if not state.any_need(slots):
            return self.greedy(self._constrained(logits, allowed))
        on_device = self.place.to_device(slots)
        if state.tables is not None:
            # what is -inf before penalties and bias stays so
            masked = self._constrained(logits, allowed)
            return sample_in_kernels(state, on_device, masked, positions, tree)
        requests = Requests(state, self.columns, slots, nodes_of(on_device, positions, tree))
        logits = self._constrained(apply(ADJUSTMENTS, logits.float(), requests), allowed)
        if not any(state.asks(slot, ("temperature",)) for slot in slots):
            return self.greedy(logits)
        return self._best(apply(CHOICES, logits, requests), requests.noise())

    def samples_in_graphs(self, sampled: bool) -> bool:
        """Whether a captured step may sample itself. sampled: whether any of its requests takes
        more than an argmax."""
        return self.state.tables is not None

    def greedy(self, logits: Tensor) -> Tensor:
        """As ``sample``, for requests that take nothing but the best token: [b, T, …] -> [b, T].
        Nothing is decided on the host."""
        return self.state.backend.best_of(logits)

    def _best(self, scores: Tensor, noise: RowNoise) -> Tensor:
        """The best token with the noise: scores [b, T, …] float32 -> [b, T] int64."""
        added = self.state.backend.gumbel(noise.seeds, noise.positions, noise.vocab_size)
        # two roundings on every device, as in the kernels
        added.mul_(noise.temperatures[:, None]).add_(scores.flatten(0, 1))
        return self.greedy(added.view_as(scores))

    def _constrained(self, logits: Tensor, allowed: TokenMasks | None) -> Tensor:
        """-inf for tokens that a grammar forbids, after all that could raise them: [b, T, …]. Never
        in place, since logprobs are of the raw logits."""
        if allowed is None:
            return logits
        return self._masked(logits.flatten(0, 1), *allowed).view(logits.shape)

    def _masked(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        return self.state.backend.mask_logits(logits, rows, masks)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """``Backend.token_logprobs`` of logits [n, V], or of a rank's columns of these."""
        return self.state.backend.token_logprobs(logits, tokens, top)

    def agree(self, tree: Tree) -> Tree:
        """The trees that all ranks of a stage verify, from those that each has drafted."""
        return tree

    def relay(self, tree: Tree) -> None:
        """Tell the other stages these trees, or overwrite them with what the last one tells."""
        if self.stages.size > 1:
            self.stages.from_last(tree.packed(), Channel.TREES)

    def tell(self, target: Tensor) -> None:
        """Tell the other stages what a graph has sampled, [b, T] int64."""
        if self.stages.size > 1:
            self.stages.from_last(target.clone(), Channel.TOKENS)  # the next step overwrites it


class ShardedChooser(Chooser):
    """Ranks that find the tokens together; the logits stay where they are. Tokens are those that
    one rank finds in all logits, bit for bit."""

    def agree(self, tree: Tree) -> Tree:
        """Rank 0's trees. Scores stay each rank's own: only rank 0 reports them."""
        return Tree.unpacked(self.group.from_first(tree.packed()), tree.scores)

    def samples_in_graphs(self, sampled: bool) -> bool:
        return not sampled  # more than that is decided on the host

    def greedy(self, logits: Tensor) -> Tensor:
        return self._best(logits, None)

    def _best(self, scores: Tensor, noise: RowNoise | None) -> Tensor:
        backend, columns = self.state.backend, self.columns
        flat, width = scores.flatten(0, 1), max(columns.sizes)
        keys = self.group.max(backend.best_keys(flat, columns.span.begin, width, noise))
        return backend.best_tokens(keys).view(scores.shape[:2])

    def _masked(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        return self.columns.forbid(logits, rows, masks)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        logits, columns = logits.float(), self.columns
        total = self._log_total(logits)
        begin, end = columns.span
        index = tokens - begin
        own = logits.gather(1, index.clamp(0, end - begin - 1))
        is_own = (index >= 0) & (index < end - begin)
        logprob = self.group.sum(torch.where(is_own, own, 0.0)) - total
        keys = columns.keys(logits)
        count = min(top, min(columns.sizes))
        found = keys.topk(count, dim=-1).values
        if count < top:  # a vocabulary with fewer tokens per rank than are asked for
            found = columns.whole(keys)
        else:
            found = self.group.gather(found.contiguous()).transpose(0, 1).flatten(1)
        found = found.topk(top, dim=-1).values
        return TokenLogprobs(logprob, score_of(found) - total, (found & LOW_BITS) ^ LOW_BITS)

    def _log_total(self, logits: Tensor) -> Tensor:
        """Of all ranks' columns, from each rank's own by the backend, whose order it is: float32
        [n, own V] -> [n, 1]."""
        first = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        found = self.state.backend.token_logprobs(logits, first, top=1)
        totals = self.group.gather(logits.gather(1, found.top_ids) - found.top_values)
        best = totals.amax(0)
        return best + sum_in_order((totals - best).exp()).log()
