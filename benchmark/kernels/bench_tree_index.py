"""Times a step's work on tokens and indices: the Triton kernels beside what torch launches instead.

    PYTHONPATH=python python benchmark/kernels/bench_tree_index.py --output FILE.jsonl

Everything but matrix products, attention and recurrence: choosing tokens from a drafter's logits,
growing and cutting trees, accepting, index tables. Each is timed within a captured graph, so what
the host needs to launch it is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from measure import Launch, Report, graph_us

from mamba_eagle.kernels import gpu
from mamba_eagle.kernels.top_log_probs import TopTokens, top_log_probs
from mamba_eagle.kernels.tree_attention.triton import path_masks
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes, pack_paths
from mamba_eagle.runner.commit import accept_tokens, commit_tokens
from mamba_eagle.runner.lanes import seen_by_next
from mamba_eagle.runner.pools import RequestTable
from mamba_eagle.spec.tree import candidates

STEPS, TOPK, NODES, VOCAB = 5, 3, 8, 131072
BATCHES = (1, 8, 32)
LATER = 1 << 30  # output tokens left: no launch of a benchmark ends a request


class Inputs:
    """Of a step of ``batch`` requests."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        device = torch.device("cuda")
        self.batch = batch
        self.logits = (4 * torch.randn(batch * TOPK, VOCAB, device=device)).bfloat16()
        self.best = []
        for lanes in (1, *[TOPK] * (STEPS - 1)):
            values = -3 * torch.rand(batch, lanes, TOPK, device=device)
            tokens = torch.randint(VOCAB, values.shape, device=device)
            self.best.append(TopTokens(values.sort(dim=2, descending=True).values, tokens))
        self.table = RequestTable(batch, 4096, device)
        self.table.remaining.fill_(LATER)
        self.slots = torch.arange(batch, device=device)
        self.tree = self.grow()
        self.target = self.tree.tokens.gather(1, self.tree.parents)
        self.kv_slots = torch.arange(batch * NODES, device=device).view(batch, NODES)
        self.above = torch.zeros(batch, TOPK, dtype=torch.int64, device=device)

    def top(self) -> object:
        return top_log_probs(self.logits, TOPK)

    def grow(self):  # noqa: ANN201
        grown = candidates(self.table.last_token, TOPK, STEPS)
        for best in self.best:
            grown.expand(best)
        return grown.select(NODES)

    def accept(self) -> None:
        accepted = accept_tokens(self.table, self.slots, self.tree, self.target, STEPS)
        commit_tokens(self.table, self.slots, self.kv_slots, accepted)
        self.table.run.zero_()  # in both forms: a graph repeats this

    def masks(self) -> object:
        return pack_paths(self.tree.ancestors)

    def torch_masks(self) -> object:
        return path_masks(self.tree.ancestors)

    def lanes(self) -> None:
        seen = None
        for used in range(0, TOPK * (STEPS - 1), TOPK):
            seen = continue_lanes(self.above, seen, used, 100, TOPK * (STEPS - 1)).masks

    def torch_lanes(self) -> None:
        seen = None
        for _ in range(STEPS - 1):
            seen = seen_by_next(seen, self.above)
            path_masks(seen)

    def parts(self) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
        """Name, launches of the kernels, launches of torch (with the kernels hidden)."""
        yield "top_tokens", self.top, self.top
        yield "tree", self.grow, self.grow
        yield "accept", self.accept, self.accept
        yield "masks", self.masks, self.torch_masks
        yield "lane_masks", self.lanes, self.torch_lanes


def without_kernels(launch: Launch) -> float:
    with mock.patch.object(gpu, "usable", lambda *asked: False):
        return graph_us([launch])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    results = Report(parser.parse_args().output)
    for batch in BATCHES:
        inputs = Inputs(batch)
        for part, kernels, plain in inputs.parts():
            num_bytes = inputs.logits.nbytes if part == "top_tokens" else None
            for path, us in (("triton", graph_us([kernels])), ("torch", without_kernels(plain))):
                fields = {"mode": part, "path": path, "batch": batch, "nodes": NODES}
                label = f"{part} {path} {batch}"
                results.add(label, "kernel_tree_index_us", us, num_bytes, **fields)


if __name__ == "__main__":
    main()
