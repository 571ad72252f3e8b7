"""Steps that the device is working on, and how long they took."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mamba_eagle.backend.place import Place, Timestamp
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.message import DecodeBatch, DecodeResult, StepResult, StepTrace
from mamba_eagle.runner.steps.decode_step import Outcome, Verified
from mamba_eagle.runner.steps.prompts import Logprobs, PendingPrefill
from mamba_eagle.tree.tree import Tree


class PendingDecode:
    """The results of a decode step, on their way to the host."""

    def __init__(
        self,
        place: Place,
        table: RequestTable,
        batch: DecodeBatch,
        verified: Verified,
        outcome: Outcome,
    ) -> None:
        accepted = outcome.accepted
        self.width = accepted.nodes.shape[1]
        numbers = [accepted.count[:, None], outcome.folded[:, None]]
        self.numbers = place.to_host(torch.cat([*numbers, accepted.tokens, accepted.nodes], dim=1))
        self.logprobs: dict[int, Logprobs] = {}
        self.tree: Tree | None = None
        self.traced = [table.wants_trace[slot] for slot in batch.slots]
        for i, slot in enumerate(batch.slots):
            if table.wants_logprobs[slot]:
                logits = verified.logits[i, accepted.nodes[i]]
                top = table.top_logprobs[slot]
                self.logprobs[i] = Logprobs(place, logits, accepted.tokens[i], top)
        if any(self.traced):
            self.tree = Tree(*(place.to_host(part) for part in verified.tree))

    def read(self) -> list[DecodeResult]:
        """In the batch's order."""
        results = []
        for i, (n, folded, *walk) in enumerate(self.numbers.tolist()):
            tokens, nodes = walk[: self.width], walk[self.width :]
            result = DecodeResult(tokens=tokens[:n], nodes=nodes[:n], folded=folded)
            if n and i in self.logprobs:
                result.logprobs = self.logprobs[i].read(n)
            if n and self.traced[i]:
                assert self.tree is not None
                result.trace = step_trace(self.tree, i, result)
            results.append(result)
        return results


def step_trace(tree: Tree, index: int, result: DecodeResult) -> StepTrace:
    """One of the step's trees and what became of it, for a request that asks to see them."""
    return StepTrace(
        tokens=tree.tokens[index].tolist(),
        parents=tree.parents[index].tolist(),
        scores=tree.scores[index].tolist(),
        accepted=result.nodes,
        bonus=result.tokens[-1],
    )


class Times(NamedTuple):
    """Of a step; ``before``: when the previous one ended."""

    before: Timestamp
    began: Timestamp
    decode_began: Timestamp
    ended: Timestamp


class Launched:
    """A step whose work is all given to the device; its result is read when that is done."""

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
