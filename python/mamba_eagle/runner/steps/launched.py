"""Steps that were launched: their results on the way to the host, and their times."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_eagle.backend.place import Timestamp
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.backend.programs import Committed, Verified
from mamba_eagle.message import DecodeBatch, RequestResult, StepResult, StepTrace
from mamba_eagle.runner.chooser import Chooser
from mamba_eagle.runner.constraints import Marks
from mamba_eagle.runner.steps.prompts import Logprobs, PendingPrefill, as_bytes, output_logprobs
from mamba_eagle.runner.tiers.copies import StepCopies
from mamba_eagle.tree.tree import Tree


class PendingDecode:
    """The results of a decode step, on their way to the host."""

    def __init__(
        self,
        chooser: Chooser,
        table: RequestTable,
        batch: DecodeBatch,
        verified: Verified,
        committed: Committed,
        marks: Marks | None,
        experts: Mapping[int, Tensor],
    ) -> None:
        """marks: of the grammars; None if no request of the batch has one. experts: of the
        nodes, [T, layers, k] int32, by index in the batch, for requests that ask for them."""
        self.experts = experts
        self.marks = marks or Marks({}, {})
        accepted, place = committed.accepted, chooser.place
        self.width = accepted.nodes.shape[1]
        each = (accepted.count[:, None], committed.folded[:, None], accepted.tokens, accepted.nodes)
        self.numbers = place.to_host(torch.cat(each, dim=1))  # one copy
        self.logprobs: dict[int, Logprobs] = {}
        self.hidden: dict[int, Tensor] = {}  # [nodes, hidden_size]
        self.tree: Tree | None = None
        self.traced = [table.wants_trace[slot] for slot in batch.slots]
        for i, slot in enumerate(batch.slots):
            if table.wants_logprobs[slot]:
                logits = verified.logits[i, accepted.nodes[i]]
                tokens = accepted.tokens[i]
                self.logprobs[i] = output_logprobs(chooser, table, slot, logits, tokens)
            if columns := table.wants_hidden[slot]:
                read = verified.features[i, accepted.nodes[i], :columns]
                self.hidden[i] = place.to_host(read.float())
        if any(self.traced):
            self.tree = Tree(*(place.to_host(part) for part in verified.tree))

    def read(self) -> list[RequestResult]:
        """Results in the batch's order; call it only once the device is done."""
        results = []
        for i, (n, folded, *path) in enumerate(self.numbers.tolist()):
            tokens, nodes = path[: self.width], path[self.width :]
            result = RequestResult(tokens=tokens[:n], nodes=nodes[:n], folded=folded)
            if not n:
                result.problem = self.marks.problems.get(i, "")
            if n and i in self.logprobs:
                result.logprobs = self.logprobs[i].read(n)
            if n and i in self.hidden:
                result.hidden = [as_bytes(row) for row in self.hidden[i][:n]]
            if n and self.traced[i]:
                assert self.tree is not None
                result.trace = step_trace(self.tree, i, result, self.marks.refused.get(i, []))
            if n and i in self.experts:
                result.experts = as_bytes(self.experts[i][nodes[:n]])
            results.append(result)
        return results


def step_trace(tree: Tree, index: int, result: RequestResult, refused: list[int]) -> StepTrace:
    """The tree of request ``index`` and its accepted path, for requests that ask for a trace."""
    return StepTrace(
        tokens=tree.tokens[index].tolist(),
        parents=tree.parents[index].tolist(),
        scores=tree.scores[index].tolist(),
        accepted=result.nodes,
        bonus=result.tokens[-1],
        refused=refused,
    )


@dataclass
class Launched:
    """A step whose work has been launched; its result can be read once the device is done."""

    number: int
    prompts: PendingPrefill | None
    trees: PendingDecode | None
    previous: Timestamp  # end of the previous step
    began: Timestamp
    decode_began: Timestamp
    ended: Timestamp
    num_compiled: int  # kernels and graphs that were made since the runner was ready
    copies: StepCopies | None

    @property
    def done(self) -> bool:
        """Whether ``result`` returns without waiting."""
        return self.ended.reached and (self.copies is None or self.copies.reached)

    def result(self) -> StepResult:
        """Wait for the device and return the results, in the plan's order. Times in seconds."""
        self.ended.wait()
        result = StepResult(
            step=self.number,
            prefill=self.prompts.read() if self.prompts else [],
            decode=self.trees.read() if self.trees else [],
            seconds=self.began.until(self.ended),
            decode_seconds=self.decode_began.until(self.ended) if self.trees else 0.0,
            idle_seconds=self.previous.until(self.began),
            num_compiled=self.num_compiled,
        )
        if self.copies is not None:
            self.copies.report(result)
        return result
