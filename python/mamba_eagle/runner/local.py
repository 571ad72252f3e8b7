"""A runner in the scheduler's thread, with the two ends of the pipes that a process has."""

from __future__ import annotations

import dataclasses
from collections import deque

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import (
    CompileGrammar,
    FromRunner,
    Plan,
    Profile,
    Shutdown,
    SimulateAcceptance,
    ToRunner,
)
from mamba_eagle.runner.compiling import Compiling
from mamba_eagle.runner.make import make_runner
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.profiler import StepProfiler
from mamba_eagle.runner.steps.launched import Launched
from mamba_eagle.runner.threads import default_threads


class LocalRunner:
    """Executes what it is sent; ``receive`` gives what a process would have sent back."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises: ConfigError"""
        threads = config.cpu_threads or default_threads()
        config = dataclasses.replace(config, cpu_threads=threads)
        runner = make_runner(config, grammars=bool(config.tokenizer_path))
        assert isinstance(runner, ModelRunner)  # others have several ranks
        self._runner = runner
        self._launched: deque[Launched] = deque()
        self._replies: deque[FromRunner] = deque([runner.ready])
        self._compiling = Compiling(runner.constraints)
        self._profiler = StepProfiler(runner.backend.place, self._finish)
        runner.before_waiting = self._finish

    @property
    def overlaps(self) -> bool:
        """Whether the next plan may be sent before the last result is received."""
        return self._runner.overlaps

    @property
    def busy(self) -> bool:
        """There is something to receive."""
        return bool(self._launched or self._replies)

    @property
    def compiles(self) -> bool:
        """A grammar that threads compile may be there to receive at any time."""
        return bool(self._compiling)

    def send(self, item: ToRunner) -> None:
        """On a CPU a plan is executed at once."""
        if isinstance(item, Plan):
            launched = self._runner.launch(item)
            assert isinstance(launched, Launched)  # one stage
            self._launched.append(launched)
            self._profiler.launched()
        elif isinstance(item, Profile):
            self._replies.append(self._profiler.answer(item))
        elif isinstance(item, CompileGrammar):
            self._compiling.begin(item)
        elif isinstance(item, SimulateAcceptance):
            self._runner.simulate_accept_length(item.length)
        else:
            assert isinstance(item, Shutdown), f"no way to take a {type(item).__name__}"
            self._finish()
            self._runner.close()

    def receive(self, timeout_ms: int = -1) -> FromRunner | None:
        """Waits for the oldest step that was launched, whatever the time-out; None if there is
        none."""
        self._replies += self._compiling.take_done()
        if self._replies:
            return self._replies.popleft()
        return self._launched.popleft().result() if self._launched else None

    def _finish(self) -> None:
        while self._launched:
            self._replies.append(self._launched.popleft().result())

    def linger(self, milliseconds: int) -> None: ...

    def close(self) -> None: ...
