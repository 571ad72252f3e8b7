"""Times a step's work on tokens and indices: the Triton kernels beside what torch launches instead.

    PYTHONPATH=python python benchmark/kernels/bench_tree_index.py --output FILE.jsonl

Everything but matrix products, attention and recurrence: choosing tokens from a drafter's logits,
growing and cutting trees, accepting, index tables. Each is timed within a captured graph, so what
the host needs to launch it is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from unittest import mock

import torch

from mamba_eagle.bench.launches import Launch, Report, graph_us
from mamba_eagle.kernels import gpu
from mamba_eagle.kernels.top_log_probs import TopTokens, top_log_probs
from mamba_eagle.kernels.tree_attention.triton import path_masks
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes, pack_paths
from mamba_eagle.kernels.tree_verify import naive_rows, triton_rows
from mamba_eagle.kernels.tree_verify.triton_rows import Paths, Room
from mamba_eagle.runner.commit import accept_tokens, commit_tokens
from mamba_eagle.runner.lanes import seen_by_next
from mamba_eagle.runner.pools import RequestTable
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.drafters.pending import pending_entries
from mamba_eagle.spec.tree import candidates

STEPS, TOPK, NODES, VOCAB, HIDDEN = 5, 3, 8, 131072, 4480
ROOM = Room(history=3, rows=40, most_chain=29, accepts=STEPS + 1)
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
        places = ROOM.history + ROOM.rows + ROOM.accepts
        path = torch.arange(places, device=device).repeat(batch, 1)
        chain_len = torch.full((batch,), ROOM.most_chain // 2, device=device)
        self.paths = Paths(self.table.checkpoint, path, chain_len)
        wide = {"device": device, "dtype": torch.bfloat16}
        self.feature = torch.randn(batch, ROOM.rows, HIDDEN, **wide)
        self.saved, self.made = self.feature[:, 0].clone(), self.feature[:, :NODES].clone()
        self.accepted = Truncated(
            nodes=torch.arange(STEPS + 1, device=device).repeat(batch, 1),
            tokens=torch.zeros(batch, STEPS + 1, dtype=torch.int64, device=device),
            count=torch.full((batch,), 3, device=device),
            finished=torch.zeros(batch, dtype=torch.bool, device=device),
        )

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

    def rows(self, form: ModuleType) -> None:
        tree, accepted = self.tree, self.accepted
        step = form.begin_rows(self.slots, tree.parents, tree.ancestors, self.paths, ROOM)
        tables = (self.paths, ROOM, self.feature, self.saved)
        form.accept_rows(step, accepted.nodes, accepted.count, *tables, self.made)
        self.paths.chain_len.fill_(ROOM.most_chain // 2)  # in both forms, as above

    def pending(self) -> Launch:
        waiting = pending_entries(self.table, 28, 0, torch.bfloat16, 0)
        nothing = self.made[:, : STEPS + 1, :0]

        def step() -> None:
            waiting.append(self.slots, self.accepted, nothing)
            waiting.take(self.slots, None, STEPS + 1)
            waiting.run.zero_()  # in both forms, as above

        return step

    def parts(self) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
        """Name, launches of the kernels, launches of torch (with the kernels hidden)."""
        yield "top_tokens", self.top, self.top
        yield "tree", self.grow, self.grow
        yield "accept", self.accept, self.accept
        yield "masks", self.masks, self.torch_masks
        yield "lane_masks", self.lanes, self.torch_lanes
        yield "rows", partial(self.rows, triton_rows), partial(self.rows, naive_rows)
        kernels = self.pending()
        with hidden_kernels():
            plain = self.pending()
        yield "pending", kernels, plain


def hidden_kernels() -> AbstractContextManager:
    return mock.patch.object(gpu, "usable", lambda *asked: False)


def without_kernels(launch: Launch) -> float:
    with hidden_kernels():
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
