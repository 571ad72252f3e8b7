"""What chooses among tokens, by logits, noise and masks: the part of a ``Backend`` that drafters
rank with, samplers draw with and trees are accepted with, in the form that runs everywhere. Shapes:
as in base.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.kernels.best_token.torch import RowNoise, best_keys, best_of, best_tokens
from mamba_eagle.kernels.sampling.tables import SampledNodes, SamplingTables
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.kernels.top_log_probs.torch import TopTokens, top_log_probs
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys, noisy_scores
from mamba_eagle.kernels.top_parts.torch import merged, packed
from mamba_eagle.tree.accept import Truncated, accept, truncate
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.simulate import Forced, forced_path
from mamba_eagle.tree.tree import Tree


class TokenLogprobs(NamedTuple):
    """Log-probabilities at n places: of c tokens each, and of the best ones."""

    logprob: Tensor  # [n, c] float32
    top_values: Tensor  # [n, top] float32, best first
    top_ids: Tensor  # [n, top] int64


class TokenOps:
    """In torch."""

    # ── what a reply tells ──

    def token_logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """Log-probabilities of tokens [n, c] int64 and of the ``top`` best ones, from raw logits
        [n, V] of any float dtype."""
        logits = logits.float()
        total = logits.logsumexp(dim=-1, keepdim=True)
        values, ids = logits.topk(top, dim=-1)
        return TokenLogprobs(logits.gather(1, tokens) - total, values - total, ids)

    # ── ranking, for drafters ──

    def top_log_probs(self, logits: Tensor, k: int) -> TopTokens:
        """The k best entries of ``log_softmax(logits)``: logits [n, V], any float dtype ->
        [n, k], log-probabilities in float32."""
        return top_log_probs(logits, k)

    def top_of(self, log_probs: Tensor, k: int) -> TopTokens:
        """The k best entries of log_probs [n, V] float32 -> [n, k]."""
        return TopTokens(*log_probs.topk(k))

    def top_noisy(self, logits: Tensor, ids: Tensor | None, noise: NoiseKeys, k: int) -> TopTokens:
        """The k best guesses of samples whose noise is known, and their log-probabilities given
        that noise: logits [b, lanes, V'], any float dtype -> [b, lanes, k].

        ids: [V'] int64, the target's token of each; None: V' is V.
        """
        columns = slice(None) if ids is None else ids
        scores = noisy_scores(logits.float(), columns, noise, self.gumbel)
        best = self.top_log_probs(scores.flatten(0, 1), k)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten(logits.shape[:2])

    def top_part(
        self, logits: Tensor, first: int, ids: Tensor | None, noise: NoiseKeys | None, k: int
    ) -> Tensor:
        """What a rank tells the others of the tokens that it has the logits of, for the k best of
        all: logits [b, lanes, own V'], any float dtype -> [b·lanes, k + 1] int64.

        first: the number of the first one. ids: [own V'] int64, the target's token of each; None:
        V' is V. noise: that of ``top_noisy``; None: the logits themselves are ranked.
        """
        scores = logits.float()
        if noise is not None:
            columns = slice(first, first + logits.shape[2]) if ids is None else ids
            scores = noisy_scores(scores, columns, noise, self.gumbel)
        scores = scores.flatten(0, 1)
        best = self.top_log_probs(scores, min(k, scores.shape[1]))
        return packed(scores, best, first, k)

    def top_of_parts(
        self, of_ranks: Tensor, ids: Tensor | None, noise: NoiseKeys | None, lanes: int
    ) -> TopTokens:
        """As ``top_log_probs`` or ``top_noisy`` of all ranks' tokens, from all results of
        ``top_part``: [ranks, b·lanes, k + 1] -> [b, lanes, k]. ids: of all V' tokens."""
        best = merged(of_ranks)
        if ids is not None:
            best = best._replace(tokens=ids[best.tokens])
        return best.unflatten((of_ranks.shape[1] // lanes, lanes))

    # ── drafted trees ──

    def candidates(self, roots: Tensor, topk: int, depth: int) -> Candidates:
        """An empty set of candidates for trees of at most ``depth`` levels. roots: [b] tokens."""
        return Candidates(roots, topk)

    def accept_tokens(
        self, table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
    ) -> Truncated:
        """The accepted path of each tree, cut where its request ends (tree/accept.py).

        slots: [b] request slots. target: [b, T], the target's token at each node.
        """
        path = accept(tree, target, max_depth)
        return truncate(path, table.stop_tokens[slots], table.remaining[slots])

    def accept_forced(
        self,
        table: RequestTable,
        slots: Tensor,
        tree: Tree,
        target: Tensor,
        max_depth: int,
        forced: Forced,
    ) -> Truncated:
        """``accept_tokens`` of a forced path, for timing."""
        made = forced_path(tree, target, max_depth, *forced)
        return self.accept_tokens(table, slots, *made, max_depth)

    # ── sampling ──

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """-inf for tokens that a grammar forbids, in new memory, since logprobs are of raw logits:
        logits [n, V], of any dtype that steps have, rows [m] int64, indices of different rows,
        masks [m, W] int32, bit ``v % 32`` of word ``v // 32`` for token v -> [n, V]."""
        bits = torch.arange(32, device=masks.device, dtype=torch.int32)
        allowed = (masks.unsqueeze(2) >> bits).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
        return logits.index_copy(0, rows, logits[rows].masked_fill_(allowed == 0, -torch.inf))

    def gumbel(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        """Standard Gumbel noise, a hash of (seed, position, token id): seed and position [n] ->
        [n, V] float32."""
        return gumbel(seed, position, vocab_size)

    def best_of(self, scores: Tensor) -> Tensor:
        """The lowest token id with the highest score, NO_TOKEN where that score is not finite or
        some score is NaN: [..., V] -> [...] int64."""
        return best_of(scores)

    def best_keys(self, scores: Tensor, first: int, width: int, noise: RowNoise | None) -> Tensor:
        """Keys of a rank's best tokens, m for each row: scores [n, own V] of the tokens from
        ``first`` on -> [n, m] int64. width: the largest own V of any rank. noise: added to the
        scores, which are float32 then, if it is given."""
        return best_keys(scores, first, noise, self.gumbel)

    def best_tokens(self, keys: Tensor) -> Tensor:
        """The best token of each row, from the largest over ranks of what ``best_keys`` returns:
        [n, m] -> [n] int64, negative where none can be sampled."""
        return best_tokens(keys)

    def count_tokens(self, counts: Tensor, slots: Tensor, tokens: Tensor, number: Tensor) -> None:
        """Add the first number[i] of tokens[i] to counts[slots[i]]: counts [R, V] int32, slots and
        number [b], tokens [b, D]; the host need not know how many."""
        valid = torch.arange(tokens.shape[1], device=tokens.device) < number.unsqueeze(1)
        cells = slots.unsqueeze(1) * counts.shape[1] + torch.where(valid, tokens, 0)
        counts.view(-1).scatter_add_(0, cells.flatten(), valid.int().flatten())

    # whether ``sample_nodes`` exists; elsewhere runner/sampler.py does it in torch
    samples_in_kernels = False

    def sample_nodes(self, logits: Tensor, nodes: SampledNodes, tables: SamplingTables) -> Tensor:
        """The target's token at every node, without asking the host: logits [b, T, V], any float
        dtype -> [b, T], negative where none can be sampled."""
        raise AssertionError("only where samples_in_kernels")
