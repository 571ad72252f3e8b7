"""A step that the device works on, and how long it took."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from mamba_eagle.message import DecodeBatch, DecodeResult, StepResult
from mamba_eagle.runner.commit import step_trace
from mamba_eagle.runner.decode_step import Outcome, Verified
from mamba_eagle.runner.pools import RequestTable
from mamba_eagle.runner.prompts import Logprobs, PendingPrefill
from mamba_eagle.runner.transfer import to_host
from mamba_eagle.tree.tree import Tree


class Timestamp:
    """A point in the device's work; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.time = time.perf_counter()

    @property
    def reached(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def until(self, later: Timestamp) -> float:
        """Seconds; both have been reached."""
        if self.event is None or later.event is None:
            return later.time - self.time
        return self.event.elapsed_time(later.event) / 1e3


class PendingDecode:
    """What a decode step gives, on its way to the host."""

    def __init__(
        self, table: RequestTable, batch: DecodeBatch, verified: Verified, outcome: Outcome
    ) -> None:
        accepted = outcome.accepted
        self.steps = accepted.nodes.shape[1]
        numbers = [accepted.count[:, None], outcome.folded[:, None]]
        self.numbers = to_host(torch.cat([*numbers, accepted.tokens, accepted.nodes], dim=1))
        self.logprobs: dict[int, Logprobs] = {}
        self.tree: Tree | None = None
        self.traced = [table.wants_trace[slot] for slot in batch.slots]
        for i, slot in enumerate(batch.slots):
            if table.wants_logprobs[slot]:
                logits = verified.logits[i, accepted.nodes[i]]
                top = table.top_logprobs[slot]
                self.logprobs[i] = Logprobs(logits, accepted.tokens[i], top)
        if any(self.traced):
            self.tree = Tree(*(to_host(part) for part in verified.tree))

    def read(self) -> list[DecodeResult]:
        """In the batch's order."""
        results = []
        for i, (n, folded, *row) in enumerate(self.numbers.tolist()):
            tokens, nodes = row[: self.steps], row[self.steps :]
            result = DecodeResult(tokens=tokens[:n], nodes=nodes[:n], folded=folded)
            if n and i in self.logprobs:
                result.logprobs = self.logprobs[i].read(n)
            if n and self.traced[i]:
                assert self.tree is not None
                result.trace = step_trace(self.tree, i, result)
            results.append(result)
        return results


class Times(NamedTuple):
    """Of a step; ``before``: when the step ahead of it ended."""

    before: Timestamp
    began: Timestamp
    decode_began: Timestamp
    ended: Timestamp


class Launched:
    """All of the step's work is given to the device; the result is read when that is done."""

    def __init__(
        self, number: int, prompts: PendingPrefill | None, trees: PendingDecode | None, times: Times
    ) -> None:
        self.number, self.prompts, self.trees, self.times = number, prompts, trees, times

    @property
    def done(self) -> bool:
        """Whether ``result`` need not wait."""
        return self.times.ended.reached

    def result(self) -> StepResult:
        """Lists are in the plan's order."""
        times = self.times
        times.ended.wait()
        return StepResult(
            step=self.number,
            prefill=self.prompts.read() if self.prompts else [],
            decode=self.trees.read() if self.trees else [],
            seconds=times.began.until(times.ended),
            decode_seconds=times.decode_began.until(times.ended),
            idle_seconds=times.before.until(times.began),
        )
