"""Scheduler and runner in threads of the caller's process, for an Engine without children: the
loops of the two processes, with the same sockets between them."""

import gc
import logging
import threading
from collections.abc import Callable

import zmq

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.scheduler.process import SchedulerProcess

log = logging.getLogger("mamba_eagle.engine")


class EngineThreads:
    """Loads the model and serves until ``end``."""

    def __init__(
        self, config: EngineConfig, socket_dir: str, failed: Callable[[Exception], None]
    ) -> None:
        """failed: called in a thread with what ended it, a ConfigError if it could not start."""
        self._config, self._socket_dir, self._failed = config, socket_dir, failed
        self._ending = threading.Event()
        self._context = zmq.Context()
        self._runner = self._start(self._execute, "runner")

    def end(self) -> None:
        """Returns when it has ended: after the step that it executes, or the start."""
        self._ending.set()
        self._runner.join()
        self._context.destroy(linger=0)
        gc.collect()  # model and pools, which refer to each other

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:
                if not isinstance(error, ConfigError):
                    log.exception("the engine has failed")
                self._failed(error)

        thread = threading.Thread(target=run, name=f"mamba-eagle {name}")
        thread.start()
        return thread

    def _execute(self) -> None:
        # In this thread: torch takes a second or two, and it is this one that computes.
        from mamba_eagle.runner.start import start_rank
        from mamba_eagle.runner.worker import Worker

        worker = Worker(start_rank(self._config), self._context, self._socket_dir)
        scheduler = self._start(self._schedule, "scheduler")
        try:
            worker.serve()
        finally:
            self._ending.set()
            scheduler.join()
            worker.close()

    def _schedule(self) -> None:
        scheduler = SchedulerProcess(self._config, self._context, self._socket_dir)
        try:
            scheduler.start()
            while not self._ending.is_set():  # looked at twice a second at least, for heartbeats
                scheduler.turn()
        finally:
            scheduler.close()
