"""A scheduler and a real runner of a tiny model in one process; requests one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from runner_harness import Settings
from tensor_checks import torch_path
from thread_ranks import RunnerRanks

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import ExportPrefix, Generate, ImportPrefix, PrefixMoved, RequestOutput
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.runner.assemble import assemble


class Served(NamedTuple):
    """What must not depend on the cache, and ``cached``, which does."""

    tokens: list[int]
    accepted: list[int]  # steps by number of accepted drafts
    cached: int

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Served)
        return self[:2] == other[:2]

    __hash__ = None  # type: ignore[assignment]


def runner_of(config: EngineConfig) -> Any:
    """Of one rank, or of several in threads."""
    if config.num_ranks == 1:
        return assemble(config)
    return RunnerRanks(config, config.tp_size, config.pp_size)


class Sequential:
    """Checks the integrity of the scheduler after each step."""

    def __init__(self, settings: Settings, model: Path, head: Path | None, **others: Any) -> None:
        others = {"max_total_tokens": 3000, "speculative_adaptive": False, **others}
        config = settings.config(model, head, **others)
        self.fused = settings.fused
        with torch_path(not self.fused):
            self.runner = runner_of(config)
        self.engine = OfflineEngine(config, self.runner)
        self.count = 0

    def add(self, prompt: list[int], sampling: SamplingParams) -> str:
        self.count += 1
        rid = f"r{self.count}"
        assert not self.engine.add(Generate(rid=rid, token_ids=prompt, sampling=sampling))
        return rid

    def step(self) -> list[RequestOutput]:
        with torch_path(not self.fused):
            outputs = self.engine.step()
        self.engine.scheduler.check_integrity()
        return outputs

    def serve(self, prompt: list[int], sampling: SamplingParams) -> Served:
        rid, tokens = self.add(prompt, sampling), []
        last = None
        while not self.engine.idle:
            for output in self.step():
                if output.rid == rid:
                    tokens += output.token_ids
                    last = output
        assert last is not None and last.finish is not None
        return Served(tokens, last.accept_histogram, last.cached_tokens)

    def hits(self, kind: str) -> int:
        return self.engine.scheduler.cache_use().hits[kind]


def move(server: Sequential, asked: ExportPrefix | ImportPrefix) -> PrefixMoved:
    exchange = server.engine.scheduler.tiers.exchange
    assert exchange is not None
    (exchange.send if isinstance(asked, ExportPrefix) else exchange.receive)(asked)
    while not server.engine.idle:
        server.step()
    (reply,) = exchange.take_replies()
    return reply
