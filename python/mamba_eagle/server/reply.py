"""A sample as /generate replies with it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from mamba_eagle.message import StepTrace, TokenLogprob
from mamba_eagle.tokenizer.sample import Sample
from mamba_eagle.tokenizer.text import TextTokenizer

Entry = tuple[float | None, int, str | None]  # logprob, token id, text if asked for


class Reply:
    """Builds the reply of one sample; for a stream again and again, converting logprobs once."""

    def __init__(self, sample: Sample, tokenizer: TextTokenizer | None, with_text: bool) -> None:
        self.sample = sample
        self._name = tokenizer.token_text if tokenizer is not None else None
        self._text = self._name if with_text else None
        self._told_traces = 0
        self._input: tuple[list[Entry], list[list[Entry] | None]] = ([], [])
        self._output: tuple[list[Entry], list[list[Entry] | None]] = ([], [])

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.sample.visible_text(),
            "output_ids": self.sample.output_ids,
            "meta_info": self.meta_info(),
        }

    def meta_info(self) -> dict[str, Any]:
        sample = self.sample
        counters = sample.last
        count = len(sample.output_ids)
        meta: dict[str, Any] = {
            "id": sample.rid,
            "finish_reason": sample.finish.as_dict() if sample.finish is not None else None,
            "prompt_tokens": len(sample.prompt.token_ids),
            "completion_tokens": count,
            "cached_tokens": counters.cached_tokens,
            "e2e_latency": (sample.finish_time or time.time()) - sample.request.arrival,
            "weight_version": "default",
        }
        if counters.verify_steps:
            proposed = counters.proposed_drafts
            meta["spec_accept_length"] = count / counters.verify_steps
            meta["spec_accept_rate"] = counters.accepted_drafts / proposed if proposed else 0.0
            meta["spec_verify_ct"] = counters.verify_steps
            meta["spec_accept_histogram"] = counters.accept_histogram
        if sample.prompt.return_spec_trace:
            # not from the beginning each time: a long stream's events would grow without end
            meta["spec_trace"] = [self._step(each) for each in sample.traces[self._told_traces :]]
            self._told_traces = len(sample.traces)
        if sample.prompt.return_logprob:
            self._add_logprobs(meta)
        return meta

    def _step(self, trace: StepTrace) -> dict[str, Any]:
        step: dict[str, Any] = msgspec.structs.asdict(trace)
        if self._name is not None:
            step["token_texts"] = [self._name(token) for token in trace.tokens]
            step["bonus_text"] = self._name(trace.bonus)
        return step

    def _add_logprobs(self, meta: dict[str, Any]) -> None:
        best = self.sample.prompt.top_logprobs
        for side, found, (own, top) in (
            ("input", self.sample.input_logprobs, self._input),
            ("output", self.sample.logprobs, self._output),
        ):
            for item in found[len(own) :]:
                own.append(self._entry(item.logprob, item.token_id))
                top.append(self._top(item) if best else None)
            meta[f"{side}_token_logprobs"] = own
            if best:
                meta[f"{side}_top_logprobs"] = top

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        return (logprob, token_id, self._text(token_id) if self._text is not None else None)

    def _top(self, item: TokenLogprob) -> list[Entry] | None:
        if item.logprob is None:  # the first token of a prompt follows nothing
            return None
        return [self._entry(logprob, token_id) for logprob, token_id in item.top]
