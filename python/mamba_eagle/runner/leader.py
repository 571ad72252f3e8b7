"""The rank that answers in this process, the other ranks in processes of their own: for benchmarks,
without a server and its scheduler process."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import torch
import zmq

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.message import Plan, Shutdown, ToRunner
from mamba_eagle.message.channel import Sender, make_socket_dir, remove_socket_dir
from mamba_eagle.message.lifetime import module_command
from mamba_eagle.message.ranks import RANK_ENVIRONMENT
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.start import start_rank
from mamba_eagle.runner.steps.launched import Launched
from mamba_eagle.runner.turns import Begun

END_SECONDS = 60.0  # for the other ranks to end by themselves


class LeadingRunner:
    """What ``ModelRunner`` is to a benchmark, on all ranks at once. A process can lead one set of
    ranks at a time: a new one ends those of the one before."""

    leading: LeadingRunner | None = None

    def __init__(self, config: EngineConfig) -> None:
        """Raises: as ``start_rank``. If another rank cannot start, this process ends with its error
        message, since it may be waiting for that rank."""
        if LeadingRunner.leading is not None:
            LeadingRunner.leading.close()
        LeadingRunner.leading = self
        self.folder = make_socket_dir()
        self.others: list[subprocess.Popen[bytes]] = []
        self.ending = False
        atexit.register(self.close)
        os.environ.update(RANK_ENVIRONMENT)
        others = [rank for rank in range(config.num_ranks) if rank != config.answering_rank]
        for rank in others:
            self._start(config, rank)
        self.context = zmq.Context()
        self.plans: Sender[ToRunner] = Sender(self.context, self.folder, "to_runner", others)
        self.runner = start_rank(config, config.answering_rank, self.folder)
        # plans are executed one after the other here
        self.ready = msgspec.structs.replace(self.runner.ready, cohorts=1)

    def _start(self, config: EngineConfig, rank: int) -> None:
        file = Path(self.folder, "config.json")
        file.write_text(json.dumps(dataclasses.asdict(config)))
        command = [*module_command("mamba_eagle.runner.process"), "--rank", str(rank)]
        command += ["--socket-dir", self.folder, "--config-file", str(file)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.others.append(process)
        threading.Thread(target=self._watch, args=(process, rank), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        code = process.wait()
        if not self.ending:
            print(f"error: rank {rank} (pid {process.pid}) ended with {code}", file=sys.stderr)
            remove_socket_dir(self.folder)
            os._exit(1)

    @property
    def overlaps(self) -> bool:
        return self.runner.overlaps

    def launch(self, plan: Plan) -> Launched | Begun:
        self.plans.send(plan)
        return self.runner.launch(plan)

    def close(self) -> None:
        """End the other ranks; may be called again."""
        if self.ending:
            return
        self.ending = True
        LeadingRunner.leading = None
        atexit.unregister(self.close)
        with contextlib.suppress(AttributeError):  # it failed before there were any
            self.plans.send(Shutdown())
            self.runner.close()
            del self.runner  # the next one needs its memory
        for process in self.others:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        remove_socket_dir(self.folder)


def make_runner(config: EngineConfig) -> ModelRunner | LeadingRunner:
    """All ranks of a resolved ``config`` as one runner, with those that do not answer in processes
    of their own. A single rank has torch's number of threads, unless --cpu-threads gives one.

    Raises: as ``start_rank``.
    """
    if config.nnodes > 1:
        raise ConfigError(["--nnodes: is for a server; this command runs on one machine"])
    if config.num_ranks > 1:
        return LeadingRunner(config)
    threads = config.cpu_threads or torch.get_num_threads()
    return start_rank(dataclasses.replace(config, cpu_threads=threads))
