"""Drives a model runner in this process, without a scheduler: one batch, from prompts to tokens.

For benchmarks and tests. Slots are given out in the plainest way that keeps the protocol: request
i has request slot i and state slot i, and KV slots come from a free list.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import (
    DecodeBatch,
    Plan,
    PrefillItem,
    Release,
    RunnerReady,
    StepResult,
)
from mamba_eagle.message.indices import indices


class InFlight(Protocol):
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the driver needs of a ``ModelRunner``."""

    ready: RunnerReady
    overlaps: bool

    def execute(self, plan: Plan) -> StepResult: ...

    def launch(self, plan: Plan) -> InFlight: ...


class DecodeStep(NamedTuple):
    """One that has been launched."""

    slots: list[int]
    kv_slots: list[list[int]]
    launched: InFlight


@dataclass
class Generation:
    """One batch: its tokens and what they took. Times in seconds, by the clock on the wall."""

    tokens: list[list[int]]  # [requests][output tokens]
    prompt_tokens: int
    prefill_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)  # one a decode step
    step_tokens: list[int] = field(default_factory=list)  # made in that step, by all requests
    step_requests: list[int] = field(default_factory=list)  # in that step's batch
    accept_lengths: Counter[int] = field(default_factory=Counter)  # tokens of a request in a step

    @property
    def output_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + sum(self.step_seconds)

    @property
    def accept_length(self) -> float:
        """Tokens a request gains in one decode step, on average; 1.0 without speculation."""
        steps = self.accept_lengths.total()
        return sum(n * count for n, count in self.accept_lengths.items()) / steps if steps else 0.0

    @property
    def full_steps(self) -> list[int]:
        """Indices of the decode steps in which no request had finished yet."""
        full = max(self.step_requests, default=0)
        return [i for i, requests in enumerate(self.step_requests) if requests == full]

    @property
    def median_decode_latency(self) -> float:
        """Seconds of a decode step of the whole batch."""
        steps = self.full_steps
        return median(self.step_seconds[i] for i in steps) if steps else 0.0

    @property
    def median_decode_throughput(self) -> float:
        """Tokens a second of the whole batch: mean tokens of a step over the median step time."""
        steps = self.full_steps
        if not steps:
            return 0.0
        return sum(self.step_tokens[i] for i in steps) / len(steps) / self.median_decode_latency


def greedy(max_new_tokens: int) -> SamplingParams:
    """Exactly ``max_new_tokens`` best tokens: the model's stop tokens are ignored."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


def sized_for(config: EngineConfig, batch_size: int, total_tokens: int) -> EngineConfig:
    """``config`` with pools that just hold ``batch_size`` requests of ``total_tokens`` each, prompt
    and output together; sizes that were set by hand stay."""
    slots = batch_size * (total_tokens + 2 * config.tree_shape.nodes)
    return dataclasses.replace(
        config,
        max_running_requests=batch_size,
        max_total_tokens=config.max_total_tokens or slots,
        max_mamba_cache_size=config.max_mamba_cache_size or batch_size,
    )


class InProcessDriver:
    """Prefill and decode of one batch at a time on ``runner``.

    Every request keeps its slots until the batch ends; then all slots are free again.
    """

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.runner = runner
        self.shape = config.tree_shape
        self.chunk_size = config.chunked_prefill_size or runner.ready.chunked_prefill_size
        # as the scheduler does: the next step is launched before the last result is read
        self.max_in_flight = 2 if runner.overlaps else 1
        self._step = 0
        self._free_kv: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Generation:
        """Run ``prompts`` (token ids, none empty) as one batch until each has its tokens.

        Raises: ValueError if the batch does not fit the runner's pools.
        """
        self._check_fit(prompts, sampling)
        # Descending, so that pop() gives the lowest slots first.
        self._free_kv = list(range(self.runner.ready.max_kv_slots - 1, -1, -1))
        result = Generation([[] for _ in prompts], sum(len(prompt) for prompt in prompts))
        self._prefill(prompts, sampling, result)
        self._decode(sampling, result)
        self._execute(releases=[Release(slot) for slot in range(len(prompts))])
        return result

    def _check_fit(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        ready = self.runner.ready
        most = min(ready.max_running_requests, ready.max_state_slots)
        if len(prompts) > most:
            raise ValueError(f"{len(prompts)} prompts: the runner holds {most} requests")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {sampling.max_new_tokens}: must be 1 or more")
        if not all(prompts):
            raise ValueError("an empty prompt: each needs one token at least")
        longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        if longest > ready.context_length:
            raise ValueError(
                f"prompt and output of {longest} tokens: the model takes {ready.context_length}"
            )
        drafts = self.max_in_flight * self.shape.nodes
        slots = sum(len(prompt) + sampling.max_new_tokens + drafts for prompt in prompts)
        if slots > ready.max_kv_slots:
            raise ValueError(
                f"the batch needs {slots} KV slots, the runner has {ready.max_kv_slots}: "
                "raise --max-total-tokens"
            )

    def _execute(
        self,
        releases: Sequence[Release] = (),
        prefill: Sequence[PrefillItem] = (),
    ) -> StepResult:
        self._step += 1
        return self.runner.execute(
            Plan(step=self._step, releases=list(releases), prefill=list(prefill))
        )

    def _prefill(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, result: Generation
    ) -> None:
        for plan in self._prefill_plans(prompts, sampling):
            begin = time.perf_counter()
            step = self._execute(prefill=plan)
            result.prefill_seconds += time.perf_counter() - begin
            for item, made in zip(plan, step.prefill):
                if item.is_last:
                    result.tokens[item.slot].append(made.token)

    def _prefill_plans(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[list[PrefillItem]]:
        """The prompts cut so that no step has more than ``chunk_size`` tokens."""
        plans: list[list[PrefillItem]] = [[]]
        room = self.chunk_size
        for slot, prompt in enumerate(prompts):
            start = 0
            while start < len(prompt):
                if room == 0:
                    plans.append([])
                    room = self.chunk_size
                chunk = list(prompt[start : start + room])
                end = start + len(chunk)
                plans[-1].append(
                    PrefillItem(
                        slot=slot,
                        state_slot=slot,
                        start=start,
                        token_ids=indices(chunk),
                        kv_slots=indices(self._free_kv.pop() for _ in chunk),
                        is_first=start == 0,
                        is_last=end == len(prompt),
                        sampling=sampling if start == 0 else None,
                        output_start=len(prompt) if start == 0 else 0,
                    )
                )
                room -= len(chunk)
                start = end
        return plans

    def _decode(self, sampling: SamplingParams, result: Generation) -> None:
        """All steps. A step's time is what passes between the results of two."""
        running = [i for i, made in enumerate(result.tokens) if not self._ended(made, sampling)]
        in_flight: deque[DecodeStep] = deque()
        before = time.perf_counter()
        while running or in_flight:
            while running and len(in_flight) < self.max_in_flight:
                in_flight.append(self._launch(list(running)))
            step = in_flight.popleft()
            made = step.launched.result().decode
            now = time.perf_counter()
            # a request that ended in the step before makes nothing in this one
            alive = [slot in running for slot in step.slots]
            if any(alive):
                result.step_seconds.append(now - before)
                result.step_tokens.append(sum(len(each.tokens) for each in made))
                result.step_requests.append(sum(alive))
            before = now
            for slot, nodes, each in zip(step.slots, step.kv_slots, made):
                # Slots of a step:  [ kept: accepted nodes, the request's until the batch ends
                #                   | rest: free again ]
                kept = set(each.nodes)
                self._free_kv += [kv for node, kv in enumerate(nodes) if node not in kept]
                if slot not in running:
                    continue
                if not each.tokens:
                    raise RuntimeError(
                        f"request slot {slot} got no token although it has "
                        f"{len(result.tokens[slot])} of {sampling.max_new_tokens}"
                    )
                result.tokens[slot] += each.tokens
                result.accept_lengths[len(each.tokens)] += 1
                if self._ended(result.tokens[slot], sampling):
                    running.remove(slot)

    def _launch(self, slots: list[int]) -> DecodeStep:
        kv_slots = [[self._free_kv.pop() for _ in range(self.shape.nodes)] for _ in slots]
        self._step += 1
        batch = DecodeBatch(shape=self.shape, slots=slots, kv_slots=kv_slots)
        return DecodeStep(slots, kv_slots, self.runner.launch(Plan(self._step, decode=batch)))

    def _ended(self, tokens: list[int], sampling: SamplingParams) -> bool:
        stops = sampling.stop_tokens(tuple(self.runner.ready.eos_token_ids))
        return len(tokens) >= sampling.max_new_tokens or tokens[-1] in stops
