"""Who turns logits into tokens: one rank alone, or ranks that each have a part of the vocabulary.

Whatever the ranks go on with is the result of an exchange: the target's tokens, and the drafted
trees. Ranks that computed either for themselves could differ in one token, and would then wait for
each other for ever. Shapes as in sampler.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.top_parts.torch import LOW_BITS, score_of
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.runner.constraints import TokenMasks
from mamba_eagle.runner.sampler import (
    MASS,
    SamplingState,
    TokenLogprobs,
    sample,
    token_logprobs,
)
from mamba_eagle.tree.tree import Tree


class Chooser:
    """One rank, which has all logits."""

    has_all_logits = True
    stages: Group = ALONE  # the pipeline stages that learn what is chosen

    def __init__(self, state: SamplingState) -> None:
        self.state, self.place = state, state.backend.place

    def sample(
        self,
        slots: list[int],
        logits: Tensor,
        positions: Tensor,
        tree: Tree | None,
        allowed: TokenMasks | None = None,
    ) -> Tensor:
        """``sampler.sample`` of logits [b, T, V], or of a rank's columns of these."""
        return sample(self.state, slots, logits, positions, tree, allowed)

    def samples_in_graphs(self, sampled: bool) -> bool:
        """Whether a captured step may sample itself. sampled: whether any of its requests takes
        more than an argmax."""
        return self.state.tables is not None

    def greedy(self, logits: Tensor) -> Tensor:
        """As ``sample``, for requests that take nothing but the best token: [b, T, …] -> [b, T].
        Nothing is decided on the host."""
        return self.state.backend.best_of(logits)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """``sampler.token_logprobs`` of logits [n, V], or of a rank's columns of these."""
        return token_logprobs(logits, tokens, top)

    def agree(self, tree: Tree) -> Tree:
        """The trees that all ranks verify, from those that each has drafted."""
        return tree


class Limits(NamedTuple):
    """The parameters of some requests that limit which tokens are kept, [b, 1, 1] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


class ShardedChooser(Chooser):
    """Ranks that find the tokens together; the logits stay where they are. Tokens are those that
    ``sampler.sample`` finds in all logits, bit for bit."""

    has_all_logits = False

    def __init__(self, state: SamplingState, group: Group) -> None:
        super().__init__(state)
        self.group, self.columns = group, Columns(group, state.vocab_size)

    def agree(self, tree: Tree) -> Tree:
        """Rank 0's trees. Scores stay each rank's own: only rank 0 reports them."""
        return Tree.unpacked(self.group.from_first(tree.packed()), tree.scores)

    def sample(
        self,
        slots: list[int],
        logits: Tensor,
        positions: Tensor,
        tree: Tree | None,
        allowed: TokenMasks | None = None,
    ) -> Tensor:
        state, needs = self.state, self.state.needs(slots)
        logits = logits.float()
        if not any(any(need) for need in needs):
            return self._best(self._constrained(logits, allowed))
        device_slots = self.place.to_device(slots)
        logits = self._adjusted(device_slots, needs, logits, positions, tree)
        logits = self._constrained(logits, allowed)
        if not any(need.noise for need in needs):
            return self._best(logits)

        numbers = state.numbers[device_slots].unsqueeze(2)  # [b, 6, 1]
        temperature, top_p, min_p = numbers.split(1, dim=1)[:3]  # [b, 1, 1]
        seed, top_k, _ = state.integers[device_slots].unsqueeze(2).split(1, dim=1)
        kept = logits
        ordered = [i for i, need in enumerate(needs) if need.order]
        if ordered:
            select = self.place.to_device(ordered)
            limits = Limits(temperature[select], top_k[select], top_p[select])
            with_k = any(need.top_k for need in needs)
            best = self._keep_best(logits[select], limits, with_k)
            kept = logits.index_copy(0, select, best)
        if any(need.min_p for need in needs):
            largest = self.columns.largest(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
            floor = largest + temperature * min_p.log()
            kept = kept.masked_fill((logits < floor) & (min_p > 0), -torch.inf)
        seeds, temperatures = (
            part[:, :, 0].expand_as(positions).reshape(-1) for part in (seed, temperature)
        )
        noise = RowNoise(seeds, positions.reshape(-1), temperatures, state.vocab_size)
        return self._best(kept, noise)

    def samples_in_graphs(self, sampled: bool) -> bool:
        return not sampled  # more than that is decided on the host

    def greedy(self, logits: Tensor) -> Tensor:
        return self._best(logits)

    def _constrained(self, logits: Tensor, allowed: TokenMasks | None) -> Tensor:
        if allowed is None:
            return logits
        flat = self.columns.forbid(logits.flatten(0, 1), allowed.rows, allowed.masks)
        return flat.view(logits.shape)

    def _best(self, scores: Tensor, noise: RowNoise | None = None) -> Tensor:
        backend, columns = self.state.backend, self.columns
        flat, width = scores.flatten(0, 1), max(columns.sizes)
        keys = self.group.max(backend.best_keys(flat, columns.span.begin, width, noise))
        return backend.best_tokens(keys).view(scores.shape[:2])

    def _adjusted(
        self,
        slots: Tensor,
        needs: list,
        logits: Tensor,
        positions: Tensor,
        tree: Tree | None,
    ) -> Tensor:
        """Penalties, bias and the ban of stop tokens, as in ``sampler.sample``."""
        state, own = self.state, self.columns.of
        numbers = state.numbers[slots].unsqueeze(2)
        repetition, frequency, presence = numbers.split(1, dim=1)[3:]
        if any(need.history for need in needs):
            counts = self._output_counts(own(state.output_counts)[slots], tree, logits.shape[1])
            seen = (counts > 0) | own(state.prompt_seen)[slots].unsqueeze(1)
            repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(seen, repeated, logits)
            logits = logits - frequency * counts - presence * (counts > 0)
        if any(need.bias for need in needs):
            logits = logits + own(state.bias)[slots].unsqueeze(1)
        if any(need.ban for need in needs):
            early = positions.unsqueeze(2) < state.integers[slots, 2][:, None, None]
            stops = own(state.stops)[slots].unsqueeze(1)
            logits = logits.masked_fill(early & stops, -torch.inf)
        return logits

    def _output_counts(self, counted: Tensor, tree: Tree | None, nodes: int) -> Tensor:
        """Output counts of this rank's tokens as seen by each node: counted [b, own V] int32 ->
        [b, T, own V] int32. A node adds its ancestors and itself, except for the root."""
        counts = counted.unsqueeze(1).repeat(1, nodes, 1)
        if tree is None or nodes == 1:
            return counts
        begin, end = self.columns.span
        index = tree.tokens.unsqueeze(1).expand_as(tree.ancestors)[:, :, 1:] - begin
        is_own = (index >= 0) & (index < end - begin)
        added = (tree.ancestors[:, :, 1:] & is_own).int()
        return counts.scatter_add_(2, index.clamp(0, end - begin - 1), added)

    def _keep_best(self, logits: Tensor, limits: Limits, with_k: bool) -> Tensor:
        """Top-k, then top-p of the remaining tokens; -inf elsewhere. [b, T, own V], the same.

        with_k: whether any request limits top-k.
        """
        nodes, columns = logits.shape[1], self.columns
        temperature, top_k, top_p = (
            part.expand(-1, nodes, -1).flatten(0, 1) for part in limits
        )  # [n, 1]
        flat = logits.flatten(0, 1)
        keys = columns.keys(flat)
        kept = torch.ones_like(keys, dtype=torch.bool)
        if with_k:
            kept = keys >= columns.last_kept(keys, kept.long(), top_k)
        scaled = (flat - columns.largest(flat)).div_(temperature)
        mass = scaled.exp_().mul_(MASS).long().masked_fill_(~kept, 0)
        total = self.group.sum(mass.sum(dim=-1, keepdim=True))
        limit = (total.double() * top_p).long().clamp(min=1)  # never reached if top_p is above 1
        kept &= keys >= columns.last_kept(keys, mass, limit)
        return flat.masked_fill(~kept, -torch.inf).view(logits.shape)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        logits, columns = logits.float(), self.columns
        best = columns.largest(logits)
        total = best + self.group.sum((logits - best).exp().sum(-1, keepdim=True)).log()
        begin, end = columns.span
        index = tokens - begin
        own = logits.gather(1, index.clamp(0, end - begin - 1)[:, None])
        is_own = (index >= 0) & (index < end - begin)
        logprob = self.group.sum(torch.where(is_own[:, None], own, 0.0)) - total
        keys = columns.keys(logits)
        count = min(top, min(columns.sizes))
        found = keys.topk(count, dim=-1).values
        if count < top:  # a vocabulary with fewer tokens per rank than are asked for
            found = columns.whole(keys)
        else:
            found = self.group.gather(found.contiguous()).transpose(0, 1).flatten(1)
        found = found.topk(top, dim=-1).values
        return TokenLogprobs(logprob[:, 0], score_of(found) - total, (found & LOW_BITS) ^ LOW_BITS)


def make_chooser(state: SamplingState, group: Group) -> Chooser:
    return Chooser(state) if group.size == 1 else ShardedChooser(state, group)
