"""From logits to tokens.

The token of a node is ``argmax(filter(logits') / temperature + gumbel(seed, position))``, and
``argmax(logits')`` at temperature 0. logits' are the logits after, in this order, penalties, bias,
the ban of stop tokens, and the mask of the request's grammar. It is computed as
``argmax(filter(logits') + temperature * gumbel)``, which is the same and needs no case for
temperature 0.

A request's tokens do not depend on its batch: all operations treat requests separately, operations
that a request does not ask for leave its logits unchanged bit for bit, and all sums that decide
which tokens are kept are integer sums, which do not depend on the order of addition.

Shapes: b requests, T tree nodes, V vocabulary, R request slots. The host knows from a batch's
request slots which operations it needs; nothing in ``sample`` waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.core import SamplingParams
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.kernels.sampling import tables as asked
from mamba_eagle.kernels.sampling.tables import SampledNodes, SamplingTables
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys, noisy_log_probs
from mamba_eagle.runner.constraints import TokenMasks
from mamba_eagle.tree.candidates import Frontier
from mamba_eagle.tree.tree import Tree, single_node_tree

NO_TOKEN = -1  # returned instead of a token where none can be sampled
MASS = 2.0**40  # the mass of a node's best token in the integer sums of top-p
LOW_BITS = 2**32 - 1
FIRST_TRY = 256  # tokens that the CPU sorts first for a top-p, before it sorts all of them


class _Needs(NamedTuple):
    """The operations that a request's sampling parameters ask for; none of them for greedy."""

    noise: bool = False
    order: bool = False  # top-k or top-p: a sort
    min_p: bool = False
    history: bool = False
    bias: bool = False
    ban: bool = False
    top_k: int = 0  # 0: no limit

    def flags(self, top_p: float) -> int:
        """As the kernels read them."""
        return (
            asked.NOISE * self.noise
            | asked.TOP_K * (self.top_k > 0)
            | asked.TOP_P * (self.noise and top_p < 1.0)
            | asked.MIN_P * self.min_p
            | asked.HISTORY * self.history
            | asked.BIAS * self.bias
            | asked.BAN * self.ban
        )


_GREEDY = _Needs()


class SamplingState:
    """Sampling parameters and token counts of each request slot, on the device.

    Counts cover all tokens of the request, including the root of its next tree. A step's accepted
    tokens, including the bonus, are passed to ``observe_accepted``, and so is the first output
    token, which prefill samples.

    Each [R, V] table is allocated when the first request needs it; where kernels sample, all are
    allocated at once, since graphs hold their addresses.
    """

    def __init__(
        self,
        max_running: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        backend: Backend,
        whole: bool = True,
    ) -> None:
        """whole: whether the sampler sees all logits, rather than a rank's part of them, which no
        kernel samples from."""
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.backend, self.device = backend, backend.device
        self._max_running = max_running
        self._needs = [_GREEDY] * max_running
        self._prompt_len = [0] * max_running
        self._with_history: set[int] = set()
        # temperature, top_p, min_p, repetition, frequency, presence
        self.numbers = torch.zeros(max_running, 6, device=self.device)
        # seed, top_k, first position where a stop token may be sampled
        self.integers = torch.zeros(max_running, 3, dtype=torch.int64, device=self.device)
        self.flags = torch.zeros(max_running, dtype=torch.int32, device=self.device)
        self.spans = torch.zeros(max_running, device=self.device)  # temperature · log(min_p)
        self._tables: dict[str, Tensor] = {}
        self.tables: SamplingTables | None = None  # what kernels read, if they sample
        if backend.samples_in_kernels and whole:
            parameters = (self.flags, self.numbers, self.spans, self.integers)
            large = (self.prompt_seen, self.output_counts, self.bias, self.stops)
            self.tables = SamplingTables(*parameters, *large)

    @property
    def num_bytes(self) -> int:
        """Of the tables that exist."""
        return sum(table.nbytes for table in self._tables.values())

    def _table(self, name: str, dtype: torch.dtype) -> Tensor:
        """A [R, V] table, allocated with zeros on first use."""
        if name not in self._tables:
            # ordinary tensors even if the first use is in inference mode
            with torch.inference_mode(False):
                self._tables[name] = torch.zeros(
                    self._max_running, self.vocab_size, dtype=dtype, device=self.device
                )
        return self._tables[name]

    @property
    def prompt_seen(self) -> Tensor:
        """[R, V] bool: the token occurs in the prompt."""
        return self._table("prompt_seen", torch.bool)

    @property
    def output_counts(self) -> Tensor:
        """[R, V] int32: how often the token occurs in the output."""
        return self._table("output_counts", torch.int32)

    @property
    def bias(self) -> Tensor:
        """[R, V] float32: logit_bias."""
        return self._table("bias", torch.float32)

    @property
    def stops(self) -> Tensor:
        """[R, V] bool: the token ends the request."""
        return self._table("stops", torch.bool)

    def set(
        self, slot: int, params: SamplingParams, prompt_len: int, history: Sequence[int]
    ) -> None:
        """Initialize request slot ``slot`` for a request, at its first prefill chunk.

        prompt_len: absolute position of the first output token. history: the tokens before the
        chunk, from position 0; read only if ``params.needs_history``.
        """
        noise = not params.greedy
        stop_tokens = sorted(
            token for token in params.stop_tokens(self.eos_token_ids) if self._valid(token)
        )
        limited = noise and 0 < params.top_k < self.vocab_size
        needs = _Needs(
            noise=noise,
            order=limited or (noise and params.top_p < 1.0),
            min_p=noise and params.min_p > 0.0,
            history=params.needs_history,
            bias=bool(params.logit_bias),
            # with a grammar the ban yields to its end, which its masks know (constrain/request.py)
            ban=params.min_new_tokens > 0 and bool(stop_tokens) and not params.grammar,
            top_k=params.top_k if limited else 0,
        )
        self._needs[slot] = needs
        self._prompt_len[slot] = prompt_len
        self.numbers[slot] = self._copied(
            [
                params.temperature if noise else 0.0,
                params.top_p if params.top_p < 1.0 else 2.0,  # above any sum: keeps all tokens
                params.min_p if noise else 0.0,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            ],
            torch.float32,
        )
        self.integers[slot] = self._copied(
            [params.seed, needs.top_k or self.vocab_size, prompt_len + params.min_new_tokens]
        )
        self.flags[slot].fill_(needs.flags(params.top_p))
        numbers = self.numbers[slot]
        self.spans[slot] = numbers[0] * numbers[2].log()
        if "bias" in self._tables:
            self.bias[slot].fill_(0.0)
        if needs.bias:
            values = self._copied(list(params.logit_bias.values()), torch.float32)
            self.bias[slot].scatter_(0, self._copied(list(params.logit_bias)), values)
        if "stops" in self._tables:
            self.stops[slot].fill_(False)
        if needs.ban:
            self.stops[slot].scatter_(0, self._copied(stop_tokens), True)
        self._with_history.discard(slot)
        if needs.history:
            self._with_history.add(slot)
            self.prompt_seen[slot].fill_(False)
            self.output_counts[slot].fill_(0)
            if history:
                self.observe(slot, self._copied(np.asarray(history)), start=0)

    def release(self, slot: int) -> None:
        """The request in ``slot`` has left. Only saves work: ``set`` overwrites everything."""
        self._needs[slot] = _GREEDY
        self._with_history.discard(slot)

    def observe(self, slot: int, tokens: Tensor, start: int) -> None:
        """Count the tokens [n] int64 of a prefill chunk at positions [start, start + n).

        Tokens from prompt_len on count as output (a retracted request prefills its own output).
        """
        if slot not in self._with_history:
            return
        split = max(0, self._prompt_len[slot] - start)
        tokens = tokens.to(self.device, non_blocking=True)
        self.prompt_seen[slot].index_fill_(0, tokens[:split], True)
        output = tokens[split:]
        ones = torch.ones_like(output, dtype=torch.int32)
        self.output_counts[slot].scatter_add_(0, output, ones)

    def observe_accepted(self, slots: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Count the first count[i] of tokens[i] as output of the request in slots[i].

        slots: [b] int64 request slots; tokens: [b, D] int64; count: [b] int64. Returns at once if
        no running request has a penalty.
        """
        if self._with_history:
            self.count(slots, tokens, count)

    def count(self, slots: Tensor, tokens: Tensor, count: Tensor) -> None:
        """As ``observe_accepted``, whether or not any request needs it: for graphs."""
        self.backend.count_tokens(self.output_counts, slots, tokens, count)

    def _copied(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.backend.place.to_device(values, dtype)

    def _valid(self, token: int) -> bool:
        return 0 <= token < self.vocab_size

    def needs(self, slots: list[int]) -> list[_Needs]:
        """The operations that each request of a batch needs. slots: [b] request slots."""
        return [self._needs[slot] for slot in slots]

    def filters_or_counts(self, slot: int) -> bool:
        """Whether what is sampled depends on more than each token's own score, or on the counts of
        tokens that a tree's nodes add."""
        need = self._needs[slot]
        return need.order or need.min_p or need.history

    def counts(self, slot: int) -> bool:
        """Whether it depends on the counts of tokens that a tree's nodes add."""
        return self._needs[slot].history

    def needs_more_than_best(self, slot: int) -> bool:
        """Whether a request takes more than an argmax."""
        return self._needs[slot] != _GREEDY

    def any_need(self, slots: list[int]) -> bool:
        """The same of any request of a batch. slots: [b] request slots."""
        return any(self._needs[slot] != _GREEDY for slot in slots)


class BatchNoise:
    """The Gumbel noise that ``sample`` will add, for drafters (``KeyedNoise`` in drafting/base.py).

    The target takes ``argmax(logits / temperature + noise)``. A drafter whose logits are close to
    the target's guesses that token best from ``log_probs / temperature + noise``, and the softmax
    of this sum measures its confidence. Filters and penalties are left out: they would cost more
    than they gain.
    """

    def __init__(self, state: SamplingState, slots: Tensor) -> None:
        """slots: [b] int64 request slots."""
        self.state, self.slots = state, slots

    def _keys(self, positions: Tensor) -> NoiseKeys:
        state = self.state
        return NoiseKeys(self.slots, positions, state.numbers, state.integers, state.vocab_size)

    def best(
        self, logits: Tensor, vocabulary: DraftVocabulary, positions: Tensor, k: int
    ) -> TopTokens:
        return vocabulary.best(logits, k, self._keys(positions))

    def noisy(self, log_probs: Tensor, positions: Tensor) -> Tensor:
        """log_probs [b, lanes, V] float32 of tokens at ``positions`` [b] -> with noise."""
        return noisy_log_probs(log_probs, self._keys(positions), self.state.backend.gumbel)

    def told(self, depth: int) -> Sequence[int]:
        """Noise tells nothing."""
        return ()

    def forced(self, requests: int, k: int, levels: int) -> None:
        """Noise forces nothing."""

    def of(self, requests: Sequence[int]) -> BatchNoise:
        return BatchNoise(self.state, self.slots[list(requests)])

    def follow(self, frontier: Frontier) -> None:
        """It is the same in all lanes."""


def sample(
    state: SamplingState,
    slots: list[int],
    logits: Tensor,
    positions: Tensor,
    tree: Tree | None,
    allowed: TokenMasks | None = None,
) -> Tensor:
    """The target's token at every node.

    slots: [b] request slots. logits: [b, T, V], any float dtype. positions: [b, T] int64, the
    absolute position of the sampled token, which is the node's own + 1. tree: None if T is 1 and
    the node is the last token counted. allowed: what the grammars of constrained requests leave.

    Returns [b, T] int64; NO_TOKEN at nodes where no token can be sampled because logits are not
    finite or all tokens are banned.
    """
    needs = state.needs(slots)
    if all(need == _GREEDY for need in needs):
        return state.backend.best_of(_constrained(state, logits, allowed))

    device_slots = state.backend.place.to_device(slots)
    if state.tables is not None:
        # what is -inf before penalties and bias stays so
        masked = _constrained(state, logits, allowed)
        return sample_in_kernels(state, device_slots, masked, positions, tree)
    numbers = state.numbers[device_slots].unsqueeze(2)  # [b, 6, 1]
    temperature, top_p, min_p, repetition, frequency, presence = numbers.split(1, dim=1)  # [b,1,1]
    seed, top_k, ban_until = state.integers[device_slots].unsqueeze(2).split(1, dim=1)  # [b, 1, 1]
    logits = logits.float()

    if any(need.history for need in needs):
        counts = _output_counts(state.output_counts[device_slots], tree, logits.shape[1])
        seen = (counts > 0) | state.prompt_seen[device_slots].unsqueeze(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - frequency * counts - presence * (counts > 0)
    if any(need.bias for need in needs):
        logits = logits + state.bias[device_slots].unsqueeze(1)
    if any(need.ban for need in needs):
        early = positions.unsqueeze(2) < ban_until
        logits = logits.masked_fill(early & state.stops[device_slots].unsqueeze(1), -torch.inf)
    logits = _constrained(state, logits, allowed)
    if not any(need.noise for need in needs):
        return state.backend.best_of(logits)

    kept = _filtered(state, needs, logits, temperature, top_k, top_p, min_p)
    seeds = seed[:, :, 0].expand_as(positions).reshape(-1)
    noise = state.backend.gumbel(seeds, positions.reshape(-1), logits.shape[2])
    # two roundings on every device, as in the kernels
    return state.backend.best_of(noise.view_as(kept).mul_(temperature).add_(kept))


def _filtered(
    state: SamplingState,
    needs: Sequence[_Needs],
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Logits [b, T, V] float32, -inf where a filter leaves a token out. The others [b, 1, 1]."""
    kept, place = logits, state.backend.place
    ordered = [i for i, need in enumerate(needs) if need.order]
    if ordered:
        width = max(needs[i].top_k or logits.shape[2] for i in ordered)
        tries = (min(width, FIRST_TRY), width) if place.on_host else (width,)
        if len(ordered) == len(needs):
            kept = _keep_best(logits, temperature, top_k, top_p, tries)
        else:
            select = place.to_device(ordered)
            limits = (temperature[select], top_k[select], top_p[select])
            kept = logits.index_copy(0, select, _keep_best(logits[select], *limits, tries))
    if any(need.min_p for need in needs):
        # p >= min_p * max(p), in logits; the filters before this one keep the best token
        floor = logits.amax(dim=-1, keepdim=True) + temperature * min_p.log()
        kept = kept.masked_fill((logits < floor) & (min_p > 0), -torch.inf)
    return kept


def sample_in_kernels(
    state: SamplingState, slots: Tensor, logits: Tensor, positions: Tensor, tree: Tree | None
) -> Tensor:
    """As ``sample``, with no decision on the host: a graph may capture it. slots: [b] int64."""
    assert state.tables is not None
    tree = tree or single_node_tree(slots)  # whose root's token is not looked at
    nodes = SampledNodes(slots, positions, tree.tokens, tree.ancestors)
    return state.backend.sample_nodes(logits, nodes, state.tables)


def _constrained(state: SamplingState, logits: Tensor, allowed: TokenMasks | None) -> Tensor:
    """-inf for tokens that a grammar forbids, after all that could raise them: [b, T, V]. Never in
    place, since logprobs are of the raw logits."""
    if allowed is None:
        return logits
    return state.backend.mask_logits(logits.flatten(0, 1), *allowed).view(logits.shape)


def _output_counts(counted: Tensor, tree: Tree | None, nodes: int) -> Tensor:
    """Output counts as seen by each node: counted [b, V] int32 -> [b, T, V] int32.

    A node adds its ancestors and itself, except for the root, which is already counted.
    """
    counts = counted.unsqueeze(1).repeat(1, nodes, 1)
    if tree is None or nodes == 1:
        return counts
    index = tree.tokens.unsqueeze(1).expand_as(tree.ancestors)[:, :, 1:]
    return counts.scatter_add_(2, index, tree.ancestors[:, :, 1:].int())


def _keep_best(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, tries: tuple[int, ...]
) -> Tensor:
    """Top-k, then top-p of the remaining tokens; -inf elsewhere. [b, T, V] -> [b, T, V] float32.

    Of tokens with equal logits, lower ids rank first. Top-p keeps a token if the tokens ranked
    before it have less than top_p of the mass. temperature, top_k, top_p: [b, 1, 1]; every request
    limits top-k or top-p. tries: numbers of best tokens to sort, in turn, until one is enough; the
    last is the largest top_k, or V if a request has none.
    """
    vocab_size = logits.shape[-1]
    keys = _ranking_keys(logits)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    mass = scaled.exp_().mul_(MASS).long()  # [b, T, V]
    whole = mass.sum(dim=-1, keepdim=True)

    # Only the device knows how many tokens a top-p without top-k keeps. Where the host does not
    # wait for it, there is a single try with all tokens. The result is the same.
    for tried in tries:
        best = keys.topk(tried, dim=-1).values if tried < vocab_size else _falling(keys)
        ranked = mass.gather(-1, vocab_size - 1 - (best & LOW_BITS))  # [b, T, tried]
        ranked.masked_fill_(torch.arange(tried, device=logits.device) >= top_k, 0)
        cumulative = ranked.cumsum(dim=-1)
        total = torch.where(top_k <= tried, cumulative[..., -1:], whole)
        limit = (total.double() * top_p).long().clamp(min=1)  # never reached if top_p is above 1
        if tried == tries[-1]:
            break
        complete = (top_k == vocab_size) & (cumulative[..., -1:] >= limit)
        if bool(((top_k <= tried) | complete).all()):
            break
    num_kept = torch.minimum(((cumulative - ranked) < limit).sum(dim=-1, keepdim=True), top_k)
    return logits.masked_fill(keys < best.gather(-1, num_kept - 1), -torch.inf)


def _ranking_keys(logits: Tensor) -> Tensor:
    """Distinct keys that order tokens by rising logit, then by falling id.

    logits [..., V] float32 -> [..., V] int64.
    """
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    return (rising.long() << 32).bitwise_or_(ids)


def _falling(keys: Tensor) -> Tensor:
    return keys.sort(dim=-1, descending=True).values


class TokenLogprobs(NamedTuple):
    """Log-probabilities of n tokens and of the best ones in their places."""

    logprob: Tensor  # [n] float32
    top_values: Tensor  # [n, top] float32, best first
    top_ids: Tensor  # [n, top] int64


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
    """Log-probabilities of tokens [n] int64 and of the ``top`` best tokens, from raw logits [n, V]
    of any float dtype."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    values, ids = logits.topk(top, dim=-1)
    return TokenLogprobs(
        logits.gather(1, tokens.unsqueeze(1))[:, 0] - total[:, 0], values - total, ids
    )
