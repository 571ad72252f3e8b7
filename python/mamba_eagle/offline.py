"""Scheduler and runner in one process: no sockets, no tokenizer, the same steps as a server's."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, FinishReason, prompt_problem
from mamba_eagle.message import Generate, Plan, RequestOutput, RunnerReady, StepResult
from mamba_eagle.scheduler.scheduler import Scheduler


class LaunchedStep(Protocol):
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the engine needs of runner/model_runner.py."""

    ready: RunnerReady

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: Plan) -> LaunchedStep: ...


class OfflineEngine:
    """Requests in, outputs out, a step at a time.

    On a GPU the next step is launched before the last result is read, as in a server.
    """

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        """config: what ``runner`` was made from."""
        self.runner = runner
        self.scheduler = Scheduler(config, runner.ready)
        self.max_in_flight = 2 if runner.overlaps else 1
        self.launched: deque[LaunchedStep] = deque()

    def add(self, message: Generate) -> list[RequestOutput]:
        """Queues a request; one that can never be served is answered at once."""
        ready, ids = self.runner.ready, message.token_ids
        if problem := prompt_problem(ids, ready.vocab_size, ready.context_length):
            reason = FinishReason("abort", message="prompt" + problem, failure=Failure.REFUSED)
            return [RequestOutput(rid=message.rid, finish=reason, prompt_tokens=len(ids))]
        return self.scheduler.add(message)

    def step(self) -> list[RequestOutput]:
        """What the next step makes; nothing when all is done, or where it ends no prompt."""
        while len(self.launched) < self.max_in_flight:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.launched.append(self.runner.launch(plan))
        if not self.launched:
            assert self.idle, "a request that waits or runs has a next step"
            return []
        return self.scheduler.process(self.launched.popleft().result())

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is on its way."""
        return self.scheduler.idle
