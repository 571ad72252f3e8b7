"""Scheduler and runner in one process: no sockets, no tokenizer, the same steps as a server's."""

import dataclasses
from collections import deque
from typing import NamedTuple, Protocol

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import Failure, FinishReason, prompt_problem
from mamba_eagle.message import Generate, Plan, Ready, RequestOutput, StepResult
from mamba_eagle.scheduler.scheduler import Scheduler


class LaunchedStep(Protocol):
    def result(self) -> StepResult: ...


class Runner(Protocol):
    """The part of ``ModelRunner`` that the engine uses."""

    ready: Ready

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: Plan) -> LaunchedStep: ...


class ExecutedStep(NamedTuple):
    """A step whose result has been read."""

    plan: Plan
    result: StepResult
    outputs: list[RequestOutput]


class OfflineEngine:
    """Requests in, outputs out, one step at a time.

    On a GPU the next step is launched before the last result is read, as in a server.
    """

    def __init__(self, config: EngineConfig, runner: Runner, prompts_first: bool = False) -> None:
        """config: the one that ``runner`` was made from. prompts_first: as for ``Scheduler``."""
        if not runner.overlaps:  # a second plan would be made before the first one's result
            config = dataclasses.replace(config, disable_overlap_schedule=True)
        self.runner = runner
        self.scheduler = Scheduler(config, runner.ready, prompts_first)
        self._in_flight: deque[tuple[Plan, LaunchedStep]] = deque()

    def add(self, message: Generate) -> list[RequestOutput]:
        """Queues a request; one that can never be served is answered at once."""
        ready, ids = self.runner.ready, message.token_ids
        if problem := prompt_problem(ids, ready.vocab_size, ready.context_length):
            reason = FinishReason("abort", message="prompt" + problem, failure=Failure.REFUSED)
            return [RequestOutput(rid=message.rid, finish=reason)]
        return self.scheduler.add(message)

    def step(self) -> list[RequestOutput]:
        """The outputs of the next step; none when all is done, or if no prompt ends in it."""
        executed = self.execute()
        return executed.outputs if executed is not None else []

    def execute(self) -> ExecutedStep | None:
        """The next step, with its plan and its times; None when all is done."""
        while (plan := self.scheduler.plan()) is not None:
            self._in_flight.append((plan, self.runner.launch(plan)))
        if not self._in_flight:
            assert self.idle, "a request that waits or runs has a next step"
            return None
        plan, launched = self._in_flight.popleft()
        result = launched.result()
        return ExecutedStep(plan, result, self.scheduler.process(result))

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is on its way."""
        return self.scheduler.idle
