"""Prompt chunks: one pass over those of a step, and the first token where a prompt is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillPart, prefill_parts, start_finished
from mamba_eagle.message import PrefillItem, PrefillResult, TokenLogprob
from mamba_eagle.runner.sampler import NO_TOKEN, TokenLogprobs, sample, token_logprobs
from mamba_eagle.runner.steps.decode_step import DecodeStep


class Logprobs:
    """Of some tokens, on their way to the host."""

    def __init__(self, place: Place, logits: Tensor, tokens: Tensor, top: int) -> None:
        """logits [n, V], tokens [n]: their logprobs, and the ``top`` best ones each."""
        self.tokens = place.to_host(tokens)
        found = token_logprobs(logits, tokens, top)
        self.parts = TokenLogprobs(*(place.to_host(part) for part in found))

    def read(self, count: int | None = None) -> list[TokenLogprob]:
        """Of the first ``count``."""
        columns = (part[:count].tolist() for part in (self.tokens, *self.parts))
        return [
            TokenLogprob(token, own, list(zip(best, which, strict=True)))
            for token, own, best, which in zip(*columns, strict=True)
        ]


@dataclass
class PendingPrefill:
    """The results of a step's prompt chunks, on their way to the host."""

    items: Sequence[PrefillItem]
    first_tokens: Tensor | None = None  # [prompts that are over]
    first_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by place among those
    input_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by place among the items

    def read(self) -> list[PrefillResult]:
        """In the items' order."""
        tokens = iter([] if self.first_tokens is None else self.first_tokens.tolist())
        results, over = [], 0
        for i, item in enumerate(self.items):
            result = PrefillResult()
            if i in self.input_logprobs:
                result.input_logprobs = self.input_logprobs[i].read()
                if max(item.logprob_start, item.start) == 0 and result.input_logprobs:
                    first = result.input_logprobs[0]
                    result.input_logprobs[0] = TokenLogprob(first.token_id, None)
            if item.is_last:
                result.token = next(tokens)
                if over in self.first_logprobs:
                    result.logprob = self.first_logprobs[over].read()[0]
                over += 1
            results.append(result)
        return results


class PromptRunner:
    """Takes requests in and runs their prompts."""

    def __init__(self, step: DecodeStep, pool: StatePool, eos_token_ids: tuple[int, ...]) -> None:
        self.step, self.pool, self.eos_token_ids = step, pool, eos_token_ids
        self.place = step.backend.place
        # of output tokens; a retracted request has generated some of them before
        self.budget_end = [0] * step.table.processed.shape[0]

    def run(self, items: Sequence[PrefillItem]) -> PendingPrefill:
        model, table = self.step.model, self.step.table
        for item in items:
            self._admit(item)
        parts = prefill_parts(items)
        tokens = self._indices([token for item in items for token in item.token_ids])
        ctx = self.step.backend.prefill_context(
            parts, self.pool, self.step.kv, table.kv_slots, model.config.mamba
        )
        state_slots = self._indices([item.state_slot for item in items])
        before = self.pool.feature[state_slots]  # copied: they are overwritten below
        features = model(tokens, ctx)
        self._keep_features(parts, features)
        table.processed[self._indices([item.slot for item in items])] = self._indices(
            [item.start + len(item.token_ids) for item in items]
        )
        for part in parts:
            span = slice(part.first, part.first + part.length)
            self.step.sampling.observe(part.item.slot, tokens[span], part.item.start)
        start_finished(self.step.scheme, items, self.place)
        self._show_drafter(parts, tokens, features, before)
        made = PendingPrefill(items)
        for i, part in enumerate(parts):
            if part.item.logprob_start >= 0:
                made.input_logprobs[i] = self._input_logprobs(part, tokens, features, before[i])
        over = [part for part in parts if part.item.is_last]
        if over:
            self._first_tokens(over, features, made)
        return made

    def _show_drafter(
        self, parts: Sequence[PrefillPart], tokens: Tensor, features: Tensor, before: Tensor
    ) -> None:
        """The chunks of tracked requests; before [parts, F]."""
        drafter = self.step.drafter
        new = [part.item.slot for part in parts if part.item.is_first and not part.item.track]
        if new:
            drafter.untrack(new)
        shown = [i for i, part in enumerate(parts) if part.item.track]
        if len(shown) < len(parts):
            ranges = [range(p.first, p.first + p.length) for p in map(parts.__getitem__, shown)]
            flat = self._indices([index for each in ranges for index in each])
            tokens, features, before = tokens[flat], features[flat], before[self._indices(shown)]
        if shown:
            drafter.observe_prefill([parts[i].item for i in shown], tokens, features, before)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return self.place.to_device(values)

    def _admit(self, item: PrefillItem) -> None:
        """The request's slot table, and at its first chunk everything else about it."""
        table, slot, start = self.step.table, item.slot, item.start
        kv_slots, first = item.kv_slots, start
        if item.is_first:
            kv_slots, first = item.prefix_kv_slots + kv_slots, 0
        table.kv_slots[slot, first : start + len(item.kv_slots)] = self._indices(
            np.asarray(kv_slots)
        )
        if not item.is_first:
            return
        params = item.sampling
        assert params is not None
        table.state_slot[slot] = item.state_slot
        table.set_stop_tokens(slot, params.stop_tokens(self.eos_token_ids))
        table.wants_logprobs[slot] = item.return_logprob
        table.top_logprobs[slot] = item.top_logprobs
        table.wants_trace[slot] = item.return_spec_trace
        self.step.sampling.set(slot, params, item.output_start, item.history)
        self.budget_end[slot] = item.output_start + params.max_new_tokens

    def _keep_features(self, parts: Sequence[PrefillPart], features: Tensor) -> None:
        """Those of the tokens at which state slots end."""
        kept = []
        for part in parts:
            item = part.item
            saves = [(save.position - item.start, save.state_slot) for save in item.saves]
            saves.append((part.length, item.state_slot))
            kept += [(state_slot, part.first + length - 1) for length, state_slot in saves]
        state_slots, ends = self._indices(list(zip(*kept)))
        self.pool.feature[state_slots] = features[ends].to(self.pool.feature.dtype)

    def _first_tokens(
        self, parts: Sequence[PrefillPart], features: Tensor, made: PendingPrefill
    ) -> None:
        """The prompts are over: their first output tokens are sampled.

        A request ends here if its token is a stop token, or if no token can be sampled: then the
        result is NO_TOKEN, and the scheduler fails the request.
        """
        table, sampling = self.step.table, self.step.sampling
        slots = [part.item.slot for part in parts]
        ends = [part.item.start + part.length for part in parts]
        left = [max(self.budget_end[slot] - end - 1, 0) for slot, end in zip(slots, ends)]
        last = [part.first + part.length - 1 for part in parts]
        used, positions, budget, last_tokens = self._indices([slots, ends, left, last])
        own = features[last_tokens]
        logits = self.step.model.compute_logits(own)
        sampled = sample(sampling, slots, logits[:, None], positions[:, None], None)[:, 0]
        is_token = sampled != NO_TOKEN
        tokens = torch.where(is_token, sampled, 0)  # tables are read by every later step
        sampling.observe_accepted(used, tokens[:, None], is_token.long())
        table.last_token[used] = tokens
        is_stop = (table.stop_tokens[used] == tokens[:, None]).any(1)
        table.remaining[used] = torch.where(is_token & ~is_stop, budget, 0)
        shown = [i for i, part in enumerate(parts) if part.item.track]
        if len(shown) == len(parts):
            self.step.drafter.observe_first_tokens(slots, tokens, own)
        elif shown:
            those = self._indices(shown)
            self.step.drafter.observe_first_tokens(
                [slots[i] for i in shown], tokens[those], own[those]
            )
        made.first_tokens = self.place.to_host(sampled)
        for i, part in enumerate(parts):
            if part.item.return_logprob:
                top = part.item.top_logprobs
                made.first_logprobs[i] = Logprobs(
                    self.place, logits[i : i + 1], tokens[i : i + 1], top
                )

    def _input_logprobs(
        self, part: PrefillPart, tokens: Tensor, features: Tensor, before: Tensor
    ) -> Logprobs:
        """Of the chunk's tokens from position logprob_start on; that of token q comes from the
        features at q-1 (before [F]: ahead of the chunk), and the very first token has none."""
        item, span = part.item, slice(part.first, part.first + part.length)
        offset = max(item.logprob_start, item.start) - item.start
        sources = torch.cat([before[None].to(features.dtype), features[span][:-1]])[offset:]
        logits = self.step.model.compute_logits(sources)
        return Logprobs(self.place, logits, tokens[span][offset:], item.top_logprobs)
