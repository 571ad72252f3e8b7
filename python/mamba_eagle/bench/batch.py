"""One batch in this process: all prompts, then decode steps of the whole batch; what they took."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate, Ready, StepResult
from mamba_eagle.offline import OfflineEngine, Runner
from mamba_eagle.scheduler.adapters import Adapters

STEPS_IN_FLIGHT = 2  # at most; each holds a tree of KV slots for every request


@dataclass
class Generation:
    """One batch: its tokens and what they took.

    Times are the runner's own (``StepResult.seconds``), from taking a plan to the end of its work.
    The scheduler's time is left out: a server spends it in another process, beside the runner's
    step. benchmark/decisions.md has what that changes.
    """

    tokens: list[list[int]]  # [requests][output tokens]
    prompt_tokens: int
    prefill_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)  # one per decode step
    step_tokens: list[int] = field(default_factory=list)  # made in that step, by all requests
    step_requests: list[int] = field(default_factory=list)  # in that step's batch
    accept_lengths: Counter[int] = field(default_factory=Counter)  # tokens per request and step

    @property
    def output_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + sum(self.step_seconds)

    @property
    def accept_length(self) -> float:
        """Tokens that a request gains per decode step, on average; 1.0 without speculation."""
        steps = self.accept_lengths.total()
        return sum(n * count for n, count in self.accept_lengths.items()) / steps if steps else 0.0

    @property
    def full_steps(self) -> list[int]:
        """Indices of the decode steps in which no request had finished yet."""
        full = max(self.step_requests, default=0)
        return [i for i, requests in enumerate(self.step_requests) if requests == full]

    @property
    def median_decode_latency(self) -> float:
        """Seconds per decode step of the whole batch."""
        steps = self.full_steps
        return median(self.step_seconds[i] for i in steps) if steps else 0.0

    @property
    def mean_decode_latency(self) -> float:
        """The same on average: a median hides the steps that fold, and those that waited."""
        steps = self.full_steps
        return mean(self.step_seconds[i] for i in steps) if steps else 0.0

    @property
    def median_decode_throughput(self) -> float:
        """Tokens per second of the whole batch: mean tokens per step over the median step time."""
        steps = self.full_steps
        if not steps:
            return 0.0
        return mean(self.step_tokens[i] for i in steps) / self.median_decode_latency

    def add(self, result: StepResult) -> None:
        """Counts a step. One that only releases slots takes no time of the batch."""
        if result.prefill:
            self.prefill_seconds += result.seconds
        # A request that ended in the step before makes nothing in this one.
        counts = [len(each.tokens) for each in result.decode if each.tokens]
        if counts:
            self.step_seconds.append(result.seconds)
            self.step_tokens.append(sum(counts))
            self.step_requests.append(len(counts))
            self.accept_lengths.update(counts)


def greedy(max_new_tokens: int) -> SamplingParams:
    """Exactly ``max_new_tokens`` best tokens: the model's stop tokens are ignored."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


def sized_for(config: EngineConfig, batch_size: int, total_tokens: int) -> EngineConfig:
    """``config`` with pools that just hold ``batch_size`` requests of ``total_tokens`` each, prompt
    and output together; sizes that were set by hand stay."""
    slots = batch_size * (total_tokens + STEPS_IN_FLIGHT * config.tree_shape.nodes)
    return dataclasses.replace(
        config,
        max_running_requests=batch_size,
        max_total_tokens=config.max_total_tokens or slots,
        max_mamba_cache_size=config.max_mamba_cache_size or batch_size,
    )


class BatchRun:
    """A batch under way in an engine of its own; ``made`` is what it has made so far."""

    def __init__(
        self,
        engine: OfflineEngine,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        adapters: Sequence[str] = (),
    ) -> None:
        """Runs all prompts: every request has its first token. On a GPU the first decode step is
        then under way. adapters: requests take turns with them."""
        self.engine = engine
        self.made = Generation([[] for _ in prompts], sum(len(prompt) for prompt in prompts))
        for i, prompt in enumerate(prompts):
            adapter = adapters[i % len(adapters)] if adapters else ""
            message = Generate(
                rid=str(i), token_ids=list(prompt), sampling=sampling, adapter=adapter
            )
            for refused in engine.add(message):
                assert refused.finish is not None
                raise ValueError(refused.finish.message)
        while not all(self.made.tokens):
            self._step()

    def finish(self) -> Generation:
        """Runs all decode steps, until every slot is free again."""
        while not self.engine.idle:
            self._step()
        return self.made

    def _step(self) -> None:
        step = self.engine.execute()
        assert step is not None, "a request without all of its tokens has a next step"
        self.made.add(step.result)
        for output in step.outputs:
            if output.finish is not None and output.finish.kind == "abort":
                raise RuntimeError(f"request {output.rid} failed: {output.finish.message}")
            self.made.tokens[int(output.rid)] += output.token_ids


class BatchEngine:
    """Runs one batch after the other on ``runner``, each like the first: slots are handed out in
    the same order, no prefix is reused, all prompts come before the first decode step, and every
    step drafts the configured tree."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        load: Callable[[Adapters], Sequence[str]] = lambda _: (),
    ) -> None:
        """config: the one that ``runner`` was made from. load: gives a scheduler adapters, and
        says what they are called."""
        self.runner, self._load = runner, load
        self.shape = config.tree_shape
        self._config = dataclasses.replace(
            config, disable_radix_cache=True, speculative_adaptive=False
        )

    @property
    def ready(self) -> Ready:
        """What the runner holds."""
        return self.runner.ready

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Generation:
        """Run ``prompts`` (token ids, none empty) as one batch until each has its tokens.

        Raises: ValueError if the batch does not fit the runner's pools, RuntimeError if the runner
        fails.
        """
        return self.start(prompts, sampling).finish()

    def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> BatchRun:
        """Run the prompts; ``finish`` of the result runs the rest.

        Raises: as ``generate``.
        """
        self._check_fit(prompts, sampling)
        # A new scheduler hands out slots from the first on. Those of one that has served before are
        # in disorder, which made steps of the embedded model up to 7 % slower on a CPU.
        engine = OfflineEngine(self._config, self.runner, prompts_first=True)
        return BatchRun(engine, prompts, sampling, self._load(engine.scheduler.adapters))

    def _check_fit(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        ready = self.ready
        most = min(ready.max_running_requests, ready.max_state_slots)
        if len(prompts) > most:
            raise ValueError(f"{len(prompts)} prompts: the runner holds {most} requests")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {sampling.max_new_tokens}: must be 1 or more")
        if not all(prompts):
            raise ValueError("an empty prompt: each needs at least one token")
        longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        if longest > ready.context_length:
            raise ValueError(
                f"prompt and output of {longest} tokens: the model takes {ready.context_length}"
            )
        drafts = STEPS_IN_FLIGHT * self.shape.nodes
        slots = sum(len(prompt) + sampling.max_new_tokens + drafts for prompt in prompts)
        if slots > ready.max_kv_slots:
            raise ValueError(
                f"the batch needs {slots} KV slots, the runner has {ready.max_kv_slots}: "
                "raise --max-total-tokens"
            )
