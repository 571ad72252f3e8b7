"""What each request asks the sampler for, by request slot, on the host and on the device.

Shapes: b requests, R request slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import msgspec
import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.place import Numbers
from mamba_eagle.core import FILTERS, NEUTRAL, PENALTIES, SamplingParams
from mamba_eagle.drafting.base import KeyedNoise
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.kernels.sampling.tables import INTEGERS, NUMBERS, PARAMETERS, SamplingTables
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys, noisy_log_probs


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
        self._asked: list[frozenset[str]] = [frozenset()] * max_running
        self.limits = [NEUTRAL.top_k] * max_running  # top_k, or -1
        self._prompt_len = [0] * max_running
        self._with_history: set[int] = set()
        # as SamplingTables has them
        self.flags = torch.zeros(max_running, dtype=torch.int32, device=self.device)
        self.numbers = torch.zeros(max_running, len(NUMBERS), device=self.device)
        self.integers = torch.zeros(
            max_running, len(INTEGERS), dtype=torch.int64, device=self.device
        )
        self.tables: SamplingTables | None = None  # what kernels read, if they sample
        if backend.samples_in_kernels and whole:
            parameters = (self.flags, self.numbers, self.integers)
            large = (self.prompt_seen, self.output_counts, self.bias, self.stops)
            self.tables = SamplingTables(*parameters, *large)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        """[R, V], an ordinary tensor even if the first use is in inference mode."""
        shape = (self._max_running, self.vocab_size)
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    @cached_property
    def prompt_seen(self) -> Tensor:
        """[R, V] bool: the token occurs in the prompt."""
        return self._zeros(torch.bool)

    @cached_property
    def output_counts(self) -> Tensor:
        """[R, V] int32: how often the token occurs in the output."""
        return self._zeros(torch.int32)

    @cached_property
    def bias(self) -> Tensor:
        """[R, V] float32: logit_bias."""
        return self._zeros(torch.float32)

    @cached_property
    def stops(self) -> Tensor:
        """[R, V] bool: the token ends the request."""
        return self._zeros(torch.bool)

    def set(
        self, slot: int, params: SamplingParams, prompt_len: int, history: Sequence[int]
    ) -> None:
        """Initialize request slot ``slot`` for a request, at its first prefill chunk.

        prompt_len: absolute position of the first output token. history: the tokens before the
        chunk, from position 0; read only if ``params.needs_history``.
        """
        ends = params.stop_tokens(self.eos_token_ids)
        stops = sorted(token for token in ends if 0 <= token < self.vocab_size)
        params = self._effective(params, stops)
        asked = [name for name in PARAMETERS if getattr(params, name) != getattr(NEUTRAL, name)]
        self._asked[slot] = frozenset(asked)
        self.limits[slot], self._prompt_len[slot] = params.top_k, prompt_len
        numbers = self._copied([getattr(params, name) for name in NUMBERS], torch.float32)
        if "min_p" in asked:
            numbers[NUMBERS.index("min_p")].log_().mul_(numbers[NUMBERS.index("temperature")])
        self.numbers[slot] = numbers
        self.flags[slot].fill_(sum(1 << PARAMETERS.index(name) for name in asked))
        ban_until = prompt_len + params.min_new_tokens
        self.integers[slot] = self._copied([params.seed, params.top_k, ban_until])
        if "bias" in vars(self):
            self.bias[slot].fill_(0.0)
        if params.logit_bias:
            values = self._copied(list(params.logit_bias.values()), torch.float32)
            self.bias[slot].scatter_(0, self._copied(list(params.logit_bias)), values)
        if "stops" in vars(self):
            self.stops[slot].fill_(False)
        if params.min_new_tokens:
            self.stops[slot].scatter_(0, self._copied(stops), True)
        self._with_history.discard(slot)
        if params.needs_history:
            self._with_history.add(slot)
            self.prompt_seen[slot].fill_(False)
            self.output_counts[slot].fill_(0)
            if history:
                self.observe(slot, self._copied(np.asarray(history)), start=0)

    def _effective(self, params: SamplingParams, stops: list[int]) -> SamplingParams:
        """The same without what changes none of a request's tokens. stops: what may end it."""
        idle = {"temperature", *FILTERS} if params.greedy else set()
        if not 0 < params.top_k < self.vocab_size:
            idle.add("top_k")
        # with a grammar the ban yields to its end, which its masks know (constrain/request.py)
        if params.is_constrained or not stops:
            idle.add("min_new_tokens")
        return msgspec.structs.replace(params, **{name: getattr(NEUTRAL, name) for name in idle})

    def release(self, slot: int) -> None:
        """The request in ``slot`` has left. Only saves work: ``set`` overwrites everything."""
        self._asked[slot] = frozenset()
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

    def _copied(self, values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.backend.place.to_device(values, dtype)

    def number(self, name: str) -> Tensor:
        """A parameter of all request slots: [R] float32, a view."""
        return self.numbers[:, NUMBERS.index(name)]

    def integer(self, name: str) -> Tensor:
        """One of INTEGERS of all request slots: [R] int64, a view."""
        return self.integers[:, INTEGERS.index(name)]

    def asks(self, slot: int, names: Collection[str] = PARAMETERS) -> bool:
        """Whether a request asks for one of these parameters; of all: for more than an argmax."""
        return not self._asked[slot].isdisjoint(names)

    def any_need(self, slots: Sequence[int]) -> bool:
        """Whether a request of a batch takes more than an argmax. slots: [b] request slots."""
        return any(self._asked[slot] for slot in slots)

    def filters_or_counts(self, slot: int) -> bool:
        """Whether what is sampled depends on more than each token's own score, or on the counts of
        tokens that a tree's nodes add."""
        return self.asks(slot, FILTERS | PENALTIES)


class BatchNoise(KeyedNoise):
    """The Gumbel noise that ``sample`` will add, for drafters. It fixes and forces nothing, and is
    the same in all lanes.

    The target takes ``argmax(logits / temperature + noise)``. A drafter whose logits are close to
    the target's guesses that token best from ``log_probs / temperature + noise``, and the softmax
    of this sum measures its confidence. Filters and penalties are left out: they would cost more
    than they gain.
    """

    def __init__(self, state: SamplingState, slots: Tensor) -> None:
        """slots: [b] int64 request slots."""
        self.state, self.slots = state, slots

    def _keys(self, positions: Tensor) -> NoiseKeys:
        temperatures, seeds = self.state.number("temperature"), self.state.integer("seed")
        return NoiseKeys(self.slots, positions, temperatures, seeds, self.state.vocab_size)

    def best(
        self, logits: Tensor, vocabulary: DraftVocabulary, positions: Tensor, k: int
    ) -> TopTokens:
        return vocabulary.best(logits, k, self._keys(positions))

    def noisy(self, log_probs: Tensor, positions: Tensor) -> Tensor:
        """log_probs [b, lanes, V] float32 of tokens at ``positions`` [b] -> with noise."""
        return noisy_log_probs(log_probs, self._keys(positions), self.state.backend.gumbel)

    def of(self, requests: Sequence[int]) -> BatchNoise:
        return BatchNoise(self.state, self.slots[list(requests)])
