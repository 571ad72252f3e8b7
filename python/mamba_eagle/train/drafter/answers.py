"""The target's answers: made by our own engine, stored as they come, found again by a later run."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.train.drafter.prompts import DataError, Prompt

PROGRESS_SECONDS = 10.0


class Answered(NamedTuple):
    """A prompt and what the target writes behind it, its stop token included."""

    line: int
    prompt: list[int]
    answer: list[int]


class AnswerFile:
    """One JSON object a line, in a file of this process alone; all such files of a folder are read.

    A line is written at once, so whatever a killed run had answered is there.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.path = folder / ("answers.jsonl" if rank == 0 else f"answers.{rank}.jsonl")

    def repair(self) -> None:
        """Cuts off the last lines that a killed run had no time to end, in all files."""
        for path in self.folder.glob("answers*.jsonl"):
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def append(self, answered: Answered) -> None:
        line = json.dumps(answered._asdict(), separators=(",", ":")) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def read(self) -> dict[int, Answered]:
        """All answers of the folder, by line of the data."""
        found = {}
        for path in sorted(self.folder.glob("answers*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                answered = Answered(**json.loads(line))
                found[answered.line] = answered
        return found


class Budget(NamedTuple):
    """How answers are made."""

    temperature: float
    max_new_tokens: int
    max_length: int  # of prompt and answer
    seed: int

    def sampling(self, prompt: Prompt) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=min(self.max_new_tokens, self.max_length - len(prompt.token_ids)),
            temperature=self.temperature,
            seed=self.seed * 1_000_003 + prompt.line,  # any that differs from line to line
        )


def generate(config: EngineConfig, prompts: Sequence[Prompt], budget: Budget) -> Iterator[Answered]:
    """Runs all prompts through scheduler and runner in this process, in the order in which they
    end; the engine's memory is given back behind the last.

    Raises: DataError for a prompt that the engine refuses; START_ERRORS of the runner.
    """
    engine = OfflineEngine(config, ModelRunner(config))
    waiting = {str(prompt.line): prompt for prompt in prompts}
    made: dict[str, list[int]] = {rid: [] for rid in waiting}
    for rid, prompt in waiting.items():
        message = Generate(rid=rid, token_ids=prompt.token_ids, sampling=budget.sampling(prompt))
        for refused in engine.add(message):
            assert refused.finish is not None
            raise DataError(f"line {rid} of the data: {refused.finish.message}")
    while not engine.idle:
        for output in engine.step():
            made[output.rid] += output.token_ids
            if output.finish is not None:
                prompt = waiting.pop(output.rid)
                yield Answered(prompt.line, prompt.token_ids, made.pop(output.rid))
    assert not waiting, f"the scheduler left {len(waiting)} prompts without an answer"
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def answer_all(
    config: EngineConfig, prompts: Sequence[Prompt], budget: Budget, file: AnswerFile
) -> None:
    """Answers ``prompts`` and stores what comes, at once."""
    if not prompts:
        return
    begun = told = time.monotonic()
    tokens = 0
    for count, answered in enumerate(generate(config, prompts, budget), start=1):
        file.append(answered)
        tokens += len(answered.answer)
        now = time.monotonic()
        if now - told >= PROGRESS_SECONDS or count == len(prompts):
            told = now
            print(
                f"answered {count} of {len(prompts)} prompts, {tokens} tokens, "
                f"{tokens / (now - begun):.0f} tokens/s",
                flush=True,
            )
