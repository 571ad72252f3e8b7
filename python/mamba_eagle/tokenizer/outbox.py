"""Samples on their way to the scheduler."""

from __future__ import annotations

from collections import deque

import msgspec

from mamba_eagle.message import Generate, ToScheduler
from mamba_eagle.message.channel import Sender
from mamba_eagle.tokenizer.sample import Sample

# A request of thousands of samples is started and ended in turns, between which this process and
# the scheduler serve the others.
SAMPLES_PER_TURN = 32
TOKENS_PER_TURN = 32_768
TURN_SECONDS = 0.005


class Outbox:
    """Samples that were started and that the scheduler does not know yet, first come first sent."""

    def __init__(self, sender: Sender[ToScheduler]) -> None:
        self._sender = sender
        self._waiting: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, samples: deque[Sample]) -> bool:
        """Sends one turn of a request's samples and keeps the others. Returns whether they are the
        first that wait, so that the caller must send them in turns."""
        self._send(samples)
        was_empty = not self._waiting
        self._waiting += samples
        return was_empty and bool(samples)

    def send_turn(self) -> None:
        self._send(self._waiting)

    def _send(self, samples: deque[Sample]) -> None:
        """Hands the first of them to the scheduler, no more than it takes in in a moment."""
        tokens = 0
        for _ in range(min(SAMPLES_PER_TURN, len(samples))):
            sample = samples.popleft()
            if sample.finish is not None:
                continue
            sample.sent = True
            self._sender.send(_generate(sample))
            tokens += len(sample.prompt.token_ids)
            if tokens >= TOKENS_PER_TURN:
                break


def _generate(sample: Sample) -> Generate:
    prompt = sample.prompt
    return Generate(
        rid=sample.engine_rid,
        token_ids=prompt.token_ids,
        # Stop strings are looked for here; thousands of them would travel for nothing.
        sampling=msgspec.structs.replace(prompt.sampling, seed=sample.seed, stop=[]),
        return_logprob=prompt.return_logprob,
        logprob_start=prompt.logprob_start,
        top_logprobs=prompt.top_logprobs,
        token_ids_logprob=prompt.token_ids_logprob,
        return_spec_trace=prompt.return_spec_trace,
        pooling=prompt.pooling,
        return_hidden_states=prompt.return_hidden_states,
        return_routed_experts=prompt.return_routed_experts,
        routed_experts_start=prompt.routed_experts_start,
        adapter=prompt.adapter,
        cache=prompt.cache,
        priority=prompt.priority,
        arrival_time=sample.request.arrival,
    )
