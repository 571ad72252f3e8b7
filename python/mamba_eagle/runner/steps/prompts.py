"""Prompt chunks: one pass over all chunks of a step, and the first tokens of finished prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.prefill import PrefillPart, prefill_parts, prompt_of, start_finished
from mamba_eagle.backend.token_ops import TokenLogprobs
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.message import PrefillItem, RequestResult, StateSave, TokenLogprob
from mamba_eagle.runner.chooser import Chooser
from mamba_eagle.runner.constraints import Marks
from mamba_eagle.runner.sampler import Scored
from mamba_eagle.runner.steps.decode_step import DecodeStep
from mamba_eagle.runner.steps.pooling import Pooling
from mamba_eagle.runner.steps.prompt_graphs import PromptGraphs


class Logprobs:
    """Log-probabilities of n tokens, on their way to the host."""

    def __init__(
        self, chooser: Chooser, table: RequestTable, slot: int, logits: Tensor, tokens: Tensor
    ) -> None:
        """logits [n, V], or a rank's columns; tokens [n] int64; table, slot: say which others are
        wanted, the best and those that the request names."""
        place = chooser.place
        self.tokens = place.to_host(tokens)
        named = place.to_device(table.token_ids_logprob[slot]).expand(len(tokens), -1)
        asked = torch.cat([tokens[:, None], named], dim=1)
        logprobs = chooser.logprobs(logits, asked, table.top_logprobs[slot])
        self.parts = TokenLogprobs(*(place.to_host(part) for part in logprobs))

    def read(self, count: int | None = None) -> list[TokenLogprob]:
        """The first ``count`` entries, or all."""
        columns = (part[:count].tolist() for part in (self.tokens, *self.parts))
        return [
            TokenLogprob(token, logprob, list(zip(top_values, top_ids, strict=True)), named)
            for token, (logprob, *named), top_values, top_ids in zip(*columns, strict=True)
        ]


def output_logprobs(
    chooser: Chooser, table: RequestTable, slot: int, logits: Tensor, tokens: Tensor
) -> Logprobs:
    """Of sampled tokens [n] of the request in ``slot``; logits [n, V]."""
    logits = at_temperature(logits, table.logprob_temperature[slot])
    return Logprobs(chooser, table, slot, logits, tokens)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """The logits whose log-probabilities are those at a temperature above 0."""
    return logits if temperature == 1.0 else logits.float() / temperature


def as_bytes(numbers: Tensor) -> bytes:
    """Of float32 or int32 on the host, little-endian."""
    found = numbers.numpy()
    return found.astype(found.dtype.newbyteorder("<"), copy=False).tobytes()


@dataclass
class PendingPrefill:
    """The results of a step's prompt chunks, on their way to the host."""

    items: Sequence[PrefillItem]
    first_tokens: Tensor | None = None  # [finished prompts] int64
    first_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by index in first_tokens
    input_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by index in items
    marks: Marks = Marks({}, {})  # of the grammars, by index in first_tokens
    embeddings: dict[int, Tensor] = field(default_factory=dict)  # [hidden_size], by index in items
    experts: dict[int, Tensor] = field(default_factory=dict)  # by index in items
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [hidden_size], as first_logprobs
    # what ``PromptRunner.finish`` needs: the finished prompts, and the features of all parts
    finished: Sequence[PrefillPart] = ()
    features: Tensor | None = None

    def read(self) -> list[RequestResult]:
        """Results in the items' order; call it only once the device is done."""
        tokens = iter([] if self.first_tokens is None else self.first_tokens.tolist())
        results, finished = [], 0
        for i, item in enumerate(self.items):
            result = RequestResult()
            if i in self.input_logprobs:
                result.input_logprobs = self.input_logprobs[i].read()
                if max(item.logprob_start, item.start) == 0 and result.input_logprobs:
                    first = result.input_logprobs[0]
                    result.input_logprobs[0] = TokenLogprob(first.token_id, None)
            if item.is_last:
                result.tokens = [token for token in (next(tokens),) if token != NO_TOKEN]
                if not result.tokens:
                    result.problem = self.marks.problems.get(finished, "")
                elif finished in self.first_logprobs:
                    result.logprobs = self.first_logprobs[finished].read()
                if finished in self.hidden:
                    result.hidden = [as_bytes(self.hidden[finished])]
                finished += 1
            if i in self.embeddings:
                result.embedding = as_bytes(self.embeddings[i])
            if i in self.experts:
                result.experts = as_bytes(self.experts[i])
            results.append(result)
        return results


class Passed(NamedTuple):
    """Prompt chunks and what the target made of them, for a drafter to observe: n tokens,
    concatenated in the items' order."""

    items: Sequence[PrefillItem]
    tokens: Tensor  # [n] int64
    features: Tensor  # [n, F]
    before: Tensor  # [items, F]: the feature of the token before each chunk

    def only(self, chosen: Sequence[int], place: Place) -> Passed:
        """These items alone."""
        parts = prefill_parts(self.items)
        ranges = [range(parts[i].first, parts[i].first + parts[i].length) for i in chosen]
        flat = place.to_device([index for indices in ranges for index in indices])
        items = [self.items[i] for i in chosen]
        before = self.before[place.to_device(chosen)]
        return Passed(items, self.tokens[flat], self.features[flat], before)

    def extended(self, pool: StatePool, journals: SavedJournals) -> Passed:
        """With the tokens that the target took from a journal and the drafter has not followed: it
        processes them from the features in their rows. A drafter that is recurrent itself has
        states at anchors only."""
        items, tokens, features, before = [], [], [], []
        for i, part in enumerate(prefill_parts(self.items)):
            item = part.item
            tokens.append(self.tokens[part.flat])
            features.append(self.features[part.flat])
            before.append(self.before[i])
            start = item.first
            if start is not None and (lacking := start.draft_start) is not None:
                rows, first = start.replay, lacking.position
                assert rows is not None and rows.start <= first, "features are in rows alone"
                kept = journals.features(rows.slot, first, rows.end)
                replayed = torch.as_tensor(np.asarray(lacking.token_ids), dtype=torch.int64)
                tokens[-1] = torch.cat([replayed.to(self.tokens.device), tokens[-1]])
                features[-1] = torch.cat([kept.to(self.features.dtype), features[-1]])
                if first == rows.start:
                    before[-1] = pool.feature[item.source]
                else:
                    before[-1] = journals.features(rows.slot, first - 1, first)[0]
                item = msgspec.structs.replace(
                    item,
                    start=first,
                    first=msgspec.structs.replace(start, load_from=lacking.state_slot),
                    token_ids=lacking.token_ids + item.token_ids,
                    kv_slots=start.prefix_kv_slots[first:] + item.kv_slots,
                )
            items.append(item)
        return Passed(items, torch.cat(tokens), torch.cat(features), torch.stack(before))


def _continued(item: PrefillItem) -> PrefillItem:
    """Its own state slot holds the state at the start already, if that was replayed."""
    if item.first is None or item.first.replay is None:
        return item
    return msgspec.structs.replace(item, first=None)


MAX_CAUGHT_UP = 2048  # tokens that a drafter catches up with in one pass


class PromptRunner:
    """Admits requests and processes their prompts."""

    def __init__(self, step: DecodeStep, pool: StatePool, journals: SavedJournals) -> None:
        self.step, self.pool, self.journals = step, pool, journals
        self.eos_token_ids = step.model.config.eos_token_ids
        self.graphs = PromptGraphs(step, pool)
        self.pooling = Pooling(step.model.config.hidden_size)
        self.place = step.backend.place
        self._indices = self.place.to_device
        # by request slot: the position that output must not reach; a retracted request may have
        # generated some of its output before
        self.budget_end = [0] * step.table.processed.shape[0]

    def run(self, items: Sequence[PrefillItem]) -> PendingPrefill:
        """Process the prompt chunks of a step in one pass; ``finish`` does what is left."""
        passed, table, given = self.forward(items), self.step.table, items
        items, tokens, features, before = passed
        parts = prefill_parts(items)
        table.processed[self._indices([item.slot for item in items])] = self._indices(
            [item.start + len(item.token_ids) for item in items]
        )
        for part in parts:
            self.step.sampling.observe(part.item.slot, tokens[part.flat], part.item.start)
            self.step.constraints.observe_prompt(
                part.item.slot, part.item.token_ids, part.item.start
            )
        start_finished(self.step.scheme, items, self.place)
        self.journals.start_trails(items)
        self._show_drafter(passed._replace(items=given))
        experts = self.step.routing.of([(part.item.slot, part.length) for part in parts])
        pending = PendingPrefill(items, experts=experts)
        for i, part in enumerate(parts):
            if part.item.logprob_start >= 0:
                pending.input_logprobs[i] = _input_logprobs(
                    self.step, part, tokens, features, before[i]
                )
            if (vector := self.pooling.add(part, features)) is not None:
                pending.embeddings[i] = self.place.to_host(vector)
        pending.finished = [part for part in parts if part.item.is_last]
        pending.features = features if pending.finished else None
        return pending

    def forward(self, items: Sequence[PrefillItem]) -> Passed:
        """The target's pass over chunks: it reads and leaves states, keys and values, and rows of
        journals, and nothing is sampled."""
        model = self.step.model
        for item in items:
            self._enter(item)
        self.journals.begin(items)
        begun, items = items, [_continued(item) for item in items]
        parts = prefill_parts(items)
        tokens = self._indices(np.concatenate([np.asarray(item.token_ids) for item in items]))
        ctx, places = self.graphs.context(parts), self.journals.places(parts)
        if places is not None:
            self.journals.keep(ctx, places)
        with self._adapters(parts):
            made = self.graphs.features(tokens, ctx) if places is None else None
            features = model(tokens, ctx) if made is None else made
        # what the pass does not read is sent while the device is at it
        for item in begun:
            self._admit(item)
        state_slots = self._indices([item.state_slot for item in items])
        before = self.pool.feature[state_slots]  # copies, since the features are overwritten below
        self._keep_features(parts, features)
        if places is not None:
            self.journals.write_features(places, features)
        return Passed(items, tokens, features, before)

    def _adapters(self, parts: Sequence[PrefillPart]) -> AbstractContextManager[None]:
        """Within, rows have the adapters of their requests."""
        rows = [(part.item.slot, part.length) for part in parts]
        slots, lengths = zip(*rows)
        if not self.step.adapters.any(slots):
            return nullcontext()
        requests, each = self._indices([slots, lengths])
        return self.step.adapters.over(requests, each, sum(lengths))

    def _show_drafter(self, shown: Passed) -> None:
        """Pass the chunks of tracked requests to the drafter."""
        drafter, items = self.step.drafter, shown.items
        untracked = [item.slot for item in items if item.is_first and not item.track]
        if untracked:
            drafter.untrack(untracked)
        if any(item.first is not None and item.first.draft_start for item in items):
            if drafter.reads == "features":
                shown = shown.extended(self.pool, self.journals)
            elif drafter.reads == "tokens":
                shown = shown._replace(items=[self._caught_up(item) for item in items])
        tracked = [i for i, item in enumerate(items) if item.track]
        if len(tracked) < len(items):
            shown = shown.only(tracked, self.place)
        if tracked:
            drafter.observe_prefill(*shown)
        for item in items:
            if (copy := item.draft_copy) is not None and drafter.kv is not None:
                own, cached = np.asarray(copy.sources), np.asarray(copy.targets)
                drafter.kv.copy(self._indices(own), self._indices(cached))

    def _caught_up(self, item: PrefillItem) -> PrefillItem:
        """The drafter, which reads tokens alone, processes what it lacks before the chunk. Returns
        the chunk, which is not its first one then."""
        start = item.first
        if start is None or (lacking := start.draft_start) is None:
            return item
        nothing = self.pool.feature.new_zeros(1, self.pool.feature.shape[1])
        anchor = item.start if start.replay is None else start.replay.start
        if item.source == item.state_slot:
            anchor = -1  # it goes on in the only state slot
        begun = msgspec.structs.replace(start, load_from=lacking.state_slot)
        for first in range(lacking.position, item.start, MAX_CAUGHT_UP):
            token_ids = lacking.token_ids[first - lacking.position :][:MAX_CAUGHT_UP]
            end = first + len(token_ids)
            piece = msgspec.structs.replace(
                item,
                start=first,
                token_ids=token_ids,
                kv_slots=start.prefix_kv_slots[first:end],
                first=begun if first == lacking.position else None,
                is_last=False,
                # its own state, for those that start there later
                saves=[StateSave(anchor, item.source)] if first < anchor <= end else [],
            )
            tokens = self._indices(np.asarray(token_ids))
            features = nothing.expand(len(token_ids), -1)
            self.step.drafter.observe_prefill([piece], tokens, features, nothing)
        return msgspec.structs.replace(item, first=None)

    def _enter(self, item: PrefillItem) -> None:
        """Enter into tables what a pass over the chunk reads: its KV slots, and at the first chunk
        those of its prefix, and the request's seed and adapter."""
        table, slot, kv_slots, start = self.step.table, item.slot, item.kv_slots, item.start
        if (first := item.first) is not None:
            kv_slots, start = first.prefix_kv_slots + kv_slots, 0
            table.seed[slot].fill_(first.sampling.seed)
            self.step.adapters.admit(slot, first.adapter)
        end = start + len(kv_slots)
        table.kv_slots[slot, start:end] = self._indices(np.asarray(kv_slots))

    def _admit(self, item: PrefillItem) -> None:
        """At the first chunk, enter everything else about the request."""
        if (first := item.first) is None:
            return
        table, slot, params = self.step.table, item.slot, first.sampling
        table.state_slot[slot].fill_(item.state_slot)
        table.set_stop_tokens(slot, params.stop_tokens(self.eos_token_ids), self._indices)
        table.wants_logprobs[slot] = first.return_logprob
        table.top_logprobs[slot] = first.top_logprobs
        table.token_ids_logprob[slot] = first.token_ids_logprob
        table.logprob_temperature[slot] = first.logprob_temperature
        table.wants_trace[slot] = first.return_spec_trace
        hidden_size = self.step.model.config.hidden_size
        table.wants_hidden[slot] = hidden_size if first.return_hidden_states else 0
        self.pooling.admit(slot, first.pooling)
        self.step.routing.admit(slot, first.return_routed_experts)
        self.step.sampling.set(slot, params, first.output_start, first.history)
        self.step.constraints.admit(slot, params, first.output_start)
        self.step.constraints.observe_prompt(slot, first.history, 0)
        self.budget_end[slot] = first.output_start + params.max_new_tokens

    def _keep_features(self, parts: Sequence[PrefillPart], features: Tensor) -> None:
        """Store the features of the tokens after which states are kept. features [n, F]."""
        kept = [
            (state_slot, part.first + length - 1)
            for part in parts
            for length, state_slot in prompt_of(part).saves
        ]
        state_slots, ends = self._indices(list(zip(*kept)))
        self.pool.feature[state_slots] = features[ends].to(self.pool.feature.dtype)

    def finish(self, pending: PendingPrefill) -> None:
        """Sample the first output tokens of the prompts that have ended in a step.

        A request ends here if its token is a stop token, or if no token can be sampled. In the
        latter case the result is NO_TOKEN and the scheduler fails the request.
        """
        if pending.features is None:
            return
        parts, features, pending.features = pending.finished, pending.features, None
        table, sampling = self.step.table, self.step.sampling
        slots = [part.item.slot for part in parts]
        ends = [part.item.start + part.length for part in parts]
        left = [max(self.budget_end[slot] - end - 1, 0) for slot, end in zip(slots, ends)]
        last = [part.first + part.length - 1 for part in parts]
        device_slots, positions, budget, last_tokens = self._indices([slots, ends, left, last])
        last_features = features[last_tokens]
        logits = self.step.model.step_logits(last_features)
        sampled, marks = self.step.choice.choose(Scored(slots, logits[:, None], positions[:, None]))
        sampled = sampled[:, 0]
        is_token = sampled != NO_TOKEN
        self.step.constraints.observe(slots, sampled[:, None], is_token.long())
        tokens = torch.where(is_token, sampled, 0)  # later steps need a valid token in the tables
        sampling.observe_accepted(device_slots, tokens[:, None], is_token.long())
        table.last_token[device_slots] = tokens
        is_stop = (table.stop_tokens[device_slots] == tokens[:, None]).any(1)
        table.remaining[device_slots] = torch.where(is_token & ~is_stop, budget, 0)
        tracked = [i for i, part in enumerate(parts) if part.item.track]
        if len(tracked) == len(parts):
            self.step.drafter.observe_first_tokens(slots, tokens, last_features)
        elif tracked:
            index = self._indices(tracked)
            self.step.drafter.observe_first_tokens(
                [slots[i] for i in tracked], tokens[index], last_features[index]
            )
        pending.first_tokens, pending.marks = self.place.to_host(sampled), marks
        for i, part in enumerate(parts):
            if columns := table.wants_hidden[part.item.slot]:
                pending.hidden[i] = self.place.to_host(last_features[i, :columns].float())
            if table.wants_logprobs[part.item.slot]:
                pending.first_logprobs[i] = output_logprobs(
                    self.step.chooser, table, part.item.slot, logits[i : i + 1], tokens[i : i + 1]
                )


def _input_logprobs(
    step: DecodeStep, part: PrefillPart, tokens: Tensor, features: Tensor, before: Tensor
) -> Logprobs:
    """Logprobs of the chunk's tokens from position logprob_start on.

    The logprob of the token at position q comes from the feature at q - 1; before [F] is the
    feature before the chunk. The token at position 0 has no logprob; ``read`` removes it.
    """
    item = part.item
    offset = max(item.logprob_start, item.start) - item.start
    sources = torch.cat([before[None].to(features.dtype), features[part.flat][:-1]])[offset:]
    logits = step.model.step_logits(sources)
    return Logprobs(step.chooser, step.table, item.slot, logits, tokens[part.flat][offset:])
