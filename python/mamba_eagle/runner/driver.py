"""Drives a model runner in this process, without a scheduler: one batch, from prompts to tokens.

For benchmarks and tests. Slots are assigned in the simplest way that the protocol allows: request
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


class InFlight(Protocol):
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """The part of a ``ModelRunner`` that the driver uses."""

    ready: RunnerReady
    overlaps: bool

    def execute(self, plan: Plan) -> StepResult: ...

    def launch(self, plan: Plan) -> InFlight: ...


class DecodeStep(NamedTuple):
    """A decode step that has been launched."""

    slots: list[int]  # [b] request slots
    kv_slots: list[list[int]]  # [b][T], one per node
    launched: InFlight


@dataclass
class Generation:
    """The tokens of one batch and the time that they took. Times are wall-clock seconds."""

    tokens: list[list[int]]  # [requests][output tokens]
    prompt_tokens: int
    prefill_seconds: float = 0.0
    # one entry per decode step: its time, the tokens of all its requests, its running requests
    step_seconds: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    step_requests: list[int] = field(default_factory=list)
    accept_lengths: Counter[int] = field(default_factory=Counter)  # tokens per request and step

    @property
    def output_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + sum(self.step_seconds)

    @property
    def accept_length(self) -> float:
        """Mean tokens per request and decode step; 1.0 without speculation, 0.0 without steps."""
        steps = self.accept_lengths.total()
        return sum(n * count for n, count in self.accept_lengths.items()) / steps if steps else 0.0

    @property
    def full_steps(self) -> list[int]:
        """Indices of the decode steps in which no request had finished yet."""
        full = max(self.step_requests, default=0)
        return [i for i, requests in enumerate(self.step_requests) if requests == full]

    @property
    def median_decode_latency(self) -> float:
        """Median seconds of the steps in ``full_steps``."""
        steps = self.full_steps
        return median(self.step_seconds[i] for i in steps) if steps else 0.0

    @property
    def median_decode_throughput(self) -> float:
        """Tokens per second of the whole batch: mean tokens per step over the median step time."""
        steps = self.full_steps
        if not steps:
            return 0.0
        return sum(self.step_tokens[i] for i in steps) / len(steps) / self.median_decode_latency


def greedy(max_new_tokens: int) -> SamplingParams:
    """Greedy decoding of exactly ``max_new_tokens`` tokens: the model's stop tokens are ignored."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


def sized_for(config: EngineConfig, batch_size: int, total_tokens: int) -> EngineConfig:
    """``config`` with pools that just hold ``batch_size`` requests of ``total_tokens`` each, prompt
    and output together. Pool sizes that ``config`` already sets are kept."""
    kv_slots = batch_size * (total_tokens + 2 * config.tree_shape.nodes)
    return dataclasses.replace(
        config,
        max_running_requests=batch_size,
        max_total_tokens=config.max_total_tokens or kv_slots,
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
        # like the scheduler: the next step is launched before the previous result is read
        self.max_in_flight = 2 if runner.overlaps else 1
        self._step = 0
        self._free_kv: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Generation:
        """Run ``prompts`` (token ids) as one batch until every request has ended.

        Raises: ValueError if a prompt is empty, if max_new_tokens is below 1, or if the batch does
        not fit the runner's pools or the model's context.
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
        limit = min(ready.max_running_requests, ready.max_state_slots)
        if len(prompts) > limit:
            raise ValueError(
                f"{len(prompts)} prompts: the runner holds at most {limit} requests; raise "
                "--max-running-requests and --max-mamba-cache-size"
            )
        if sampling.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {sampling.max_new_tokens}: must be 1 or more")
        if not all(prompts):
            raise ValueError("empty prompt: each prompt needs at least one token")
        longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        if longest > ready.context_length:
            raise ValueError(
                f"prompt and output of {longest} tokens: the model takes at most "
                f"{ready.context_length}"
            )
        drafts = self.max_in_flight * self.shape.nodes
        kv_slots = sum(len(prompt) + sampling.max_new_tokens + drafts for prompt in prompts)
        if kv_slots > ready.max_kv_slots:
            raise ValueError(
                f"the batch needs {kv_slots} KV slots, the runner has {ready.max_kv_slots}: "
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
            for item, output in zip(plan, step.prefill):
                if item.is_last:
                    result.tokens[item.slot].append(output.token)

    def _prefill_plans(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[list[PrefillItem]]:
        """The prompts, cut into steps of at most ``chunk_size`` tokens each."""
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
                        token_ids=chunk,
                        kv_slots=[self._free_kv.pop() for _ in chunk],
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
        """Run all decode steps. A step's time is the time between its result and the previous one.

        Raises: RuntimeError if a running request gets no token, since it would never end.
        """
        running = [
            slot for slot, tokens in enumerate(result.tokens) if not self._ended(tokens, sampling)
        ]
        in_flight: deque[DecodeStep] = deque()
        previous = time.perf_counter()
        while running or in_flight:
            while running and len(in_flight) < self.max_in_flight:
                in_flight.append(self._launch(list(running)))
            step = in_flight.popleft()
            outputs = step.launched.result().decode
            now = time.perf_counter()
            # a request that ended in the previous step gets no tokens in this one
            alive = [slot in running for slot in step.slots]
            if any(alive):
                result.step_seconds.append(now - previous)
                result.step_tokens.append(sum(len(output.tokens) for output in outputs))
                result.step_requests.append(sum(alive))
            previous = now
            for slot, nodes, output in zip(step.slots, step.kv_slots, outputs):
                # KV slots of a step:  [ accepted nodes: the request's until the batch ends
                #                      | other nodes: free again ]
                kept = set(output.nodes)
                self._free_kv += [kv for node, kv in enumerate(nodes) if node not in kept]
                if slot not in running:
                    continue
                if not output.tokens:
                    raise RuntimeError(
                        f"request slot {slot} got no token although it has only "
                        f"{len(result.tokens[slot])} of {sampling.max_new_tokens}"
                    )
                result.tokens[slot] += output.tokens
                result.accept_lengths[len(output.tokens)] += 1
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
