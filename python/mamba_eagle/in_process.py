"""Scheduler and runner in a thread of the caller's process, for an Engine without children.

The scheduler's loop is that of its process, and the server's side talks to it through the same
sockets; plans and results are handed over by calls.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.message import Abort, ToScheduler
from mamba_eagle.message.channel import Sender
from mamba_eagle.scheduler.process import SchedulerProcess

if TYPE_CHECKING:  # it imports torch
    from mamba_eagle.runner.local import LocalRunner

log = logging.getLogger("mamba_eagle.engine")
COMPILED_MS = 1  # between two looks at grammars that are being compiled


class LocalScheduler(SchedulerProcess):
    """Without heartbeats: no one could end a thread that hangs."""

    def __init__(
        self,
        config: EngineConfig,
        context: zmq.Context[Any],
        socket_dir: str,
        runner: LocalRunner,
    ) -> None:
        self.runner = runner
        if not runner.overlaps:  # a second plan would be made before the first one's result
            config = dataclasses.replace(config, disable_overlap_schedule=True)
        super().__init__(config, context, socket_dir)

    def connect_runner(self, context: zmq.Context[Any], socket_dir: str) -> None:
        self.plans = self.results = self.runner

    def wait(self) -> None:
        """Sleeps until a message comes, unless there is a result to take."""
        if not self.runner.busy:
            self.poller.poll(COMPILED_MS if self.runner.compiles else None)

    def beat(self) -> None: ...


class EngineThread:
    """Loads the model and serves until ``end``."""

    def __init__(
        self, config: EngineConfig, socket_dir: str, failed: Callable[[Exception], None]
    ) -> None:
        """failed: called in the thread with what ended it, a ConfigError if it could not start."""
        self._config, self._socket_dir, self._failed = config, socket_dir, failed
        self._ending = threading.Event()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="mamba-eagle scheduler and runner")
        self._thread.start()

    def end(self) -> None:
        """Returns when it has ended: after the step that it executes, or the start."""
        self._ending.set()
        wake: Sender[ToScheduler] = Sender(self._context, self._socket_dir, "to_scheduler")
        wake.send(Abort())  # which leaves nothing to do, too
        self._thread.join()
        wake.close()
        self._context.term()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            if not isinstance(error, ConfigError):
                log.exception("the engine has failed")
            self._failed(error)

    def _serve(self) -> None:
        # In this thread: torch takes a second or two, and it is this one that computes.
        from mamba_eagle.runner.local import LocalRunner

        runner = LocalRunner(self._config)
        scheduler = LocalScheduler(self._config, self._context, self._socket_dir, runner)
        try:
            scheduler.start()
            while not self._ending.is_set():
                scheduler.turn()
        finally:
            scheduler.close()
