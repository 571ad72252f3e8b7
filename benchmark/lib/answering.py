"""An engine in this process and a server at a URL, which answer the same prompts the same way."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from benchmark.lib.client import server_info
from benchmark.lib.rounds import Round
from mamba_eagle.bench.client import generate_all
from mamba_eagle.config import ServerConfig, add_arguments, from_arguments
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate, SpeculationState
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner

TIMEOUT = 300.0  # seconds


class Answering(Protocol):
    def answer(self, prompts: Sequence[list[int]], parallel: int, new_tokens: int) -> Round:
        """Greedy answers to all prompts, ``parallel`` at a time; by the clock on the wall."""

    def speculation(self) -> SpeculationState:
        """What has been drafted so far."""


class Engine:
    """Scheduler and runner in this process, as the flags of a server say."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Raises: ConfigError"""
        parser = argparse.ArgumentParser()
        add_arguments(parser, ServerConfig)
        config = resolve(from_arguments(ServerConfig, parser.parse_args(flags)))
        self.engine = OfflineEngine(config, make_runner(config))
        self._names = itertools.count()

    def answer(self, prompts: Sequence[list[int]], parallel: int, new_tokens: int) -> Round:
        """Raises: ValueError if the engine refuses a prompt."""
        begin = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens)
        waiting, running, tokens, steps = list(reversed(prompts)), 0, 0, 0
        while waiting or not self.engine.idle:
            while waiting and running < parallel:
                running += 1
                rid, prompt = str(next(self._names)), waiting.pop()
                message = Generate(rid=rid, token_ids=prompt, sampling=sampling)
                for refused in self.engine.add(message):
                    assert refused.finish is not None
                    raise ValueError(refused.finish.message)
            for output in self.engine.step():
                tokens += len(output.token_ids)
                if output.finish is not None:
                    running -= 1
                    steps += output.verify_steps
        return Round(tokens, time.perf_counter() - begin, steps)

    def speculation(self) -> SpeculationState:
        return self.engine.scheduler.policy.state()


class RemoteServer:
    """A server that takes token ids."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def answer(self, prompts: Sequence[list[int]], parallel: int, new_tokens: int) -> Round:
        """Raises: ServerError"""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens}
        bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
        begin = time.perf_counter()
        replies = generate_all(self.base_url, bodies, parallel, timeout=TIMEOUT)
        seconds = time.perf_counter() - begin
        meta = [reply["meta_info"] for reply in replies]
        return Round(
            tokens=sum(each["completion_tokens"] for each in meta),
            seconds=seconds,
            steps=sum(each.get("spec_verify_ct") or 0 for each in meta),
        )

    def speculation(self) -> SpeculationState:
        """Raises: ServerError"""
        return msgspec.convert(server_info(self.base_url)["speculation"], SpeculationState)
