"""Times attention with the same bits everywhere beside the usual kernels, at 9B sizes.

    PYTHONPATH=python python -m benchmark.kernels.bench_exact_attention [--output FILE.jsonl]
    … --configs    # other divisions of the work, too

Steps: one attention layer of trees (the nodes' keys and values included) beside
``paged_tree_attention``. Prompts: beside FlashInfer, or torch without it. Launches go round the
pools of several layers; slots are scattered.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmark.kernels.bench_tree_attention import NANO_9B, Inputs, Mode
from benchmark.lib.launches import Launch, Report, graph_us
from mamba_eagle.backend.attention import PromptSpan, TreeNodes
from mamba_eagle.backend.place import Cuda
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.torch.attention import CausalAttention
from mamba_eagle.backend.triton.attention import TritonTreeAttention
from mamba_eagle.backend.triton.exact_attention import ExactPrompts, ExactTreeAttention
from mamba_eagle.kernels.exact_attention.triton import (
    Config,
    exact_prompt_attention,
    exact_tree_attention,
    prompt_config,
    prompt_tiles,
    tree_config,
)
from mamba_eagle.kernels.exact_attention.triton_pages import lay_out

BATCHES, NODES, PREFIXES = (1, 8, 32), (1, 8, 16), (300, 2048, 16384)
PROMPTS = {"32 prompts of 256": (32, 256, 0), "1 prompt of 8192": (1, 8192, 0)}
PROMPTS |= {"1 chunk of 2048 at 14336": (1, 2048, 14336)}
HEADS = (NANO_9B.num_heads, NANO_9B.num_kv_heads, NANO_9B.head_dim)


def tree_forms(inputs: Inputs) -> Iterator[tuple[str, list[Launch]]]:
    rest = (inputs.lengths, inputs.own, inputs.own, inputs.ancestors)
    nodes = TreeNodes(inputs.table, inputs.slots, *rest)
    yield "usual", inputs.through(TritonTreeAttention(inputs.pool, nodes))
    exact = ExactTreeAttention(inputs.pool, nodes)
    yield "exact", inputs.through(exact)
    if inputs.prefix == PREFIXES[0]:
        yield "pages", [partial(lay_out, exact.nodes[1], inputs.lengths)]  # once for all layers


def tree_launch(inputs: Inputs, exact: ExactTreeAttention, config: Config, layer: int) -> object:
    pools = (inputs.pool.k[layer], inputs.pool.v[layer])
    where = (*exact.sequences, *exact.nodes)
    tokens = (inputs.q, inputs.k, inputs.v)
    return exact_tree_attention(*tokens, *pools, *where, inputs.scale, config)


def tree_configs(inputs: Inputs) -> Iterator[tuple[str, list[Launch]]]:
    """Other divisions of the work."""
    rest = (inputs.lengths, inputs.own, inputs.own, inputs.ancestors)
    exact = ExactTreeAttention(inputs.pool, TreeNodes(inputs.table, inputs.slots, *rest))
    usual = tree_config(inputs.batch, inputs.mode.nodes, *HEADS, 2)
    for whole, stages in itertools.product((False, True), (3, 5)):
        config = usual._replace(whole=whole, stages=stages)
        mark = " (usual)" if config == usual else ""
        launch = partial(tree_launch, inputs, exact, config)
        label = f"{'/'.join(map(str, config))}{mark}"
        yield label, [partial(launch, layer) for layer in range(inputs.layers)]


class Prompts:
    """``batch`` chunks of ``length`` tokens at position ``start``, and a pool of two layers."""

    def __init__(self, batch: int, length: int, start: int) -> None:
        torch.manual_seed(0)
        used = batch * (start + length)
        self.pool = KVPool(2, used, NANO_9B, torch.bfloat16, torch.device("cuda"))
        self.pool.k.normal_()
        self.pool.v.normal_()
        self.table = torch.randperm(used, device="cuda").view(batch, -1)
        self.spans = [PromptSpan(i, start, length) for i in range(batch)]
        heads = [HEADS[0], HEADS[1], HEADS[1]]
        packed = torch.randn(batch * length, sum(heads), HEADS[2], device="cuda").bfloat16()
        self.inputs = packed.split(heads, dim=1)
        self.scale = HEADS[2] ** -0.5
        self.operations = 4 * HEADS[0] * HEADS[2] * batch * length * (start + length / 2)

    def through(self, attention: Any) -> list[Launch]:
        layers = (SimpleNamespace(index=i, scale=self.scale) for i in range(2))
        return [partial(attention.attend, layer, *self.inputs) for layer in layers]

    def forms(self) -> Iterator[tuple[str, list[Launch]]]:
        try:
            from mamba_eagle.backend.triton.flashinfer import FlashInferPrompts

            usual = FlashInferPrompts(self.pool, self.table, self.spans)
            yield "FlashInfer", self.through(usual)
        except ImportError:
            if len(self.spans) * self.table.shape[1] ** 2 < 2e8:
                yield "torch", self.through(CausalAttention(self.pool, self.table, self.spans))
        exact = ExactPrompts(self.pool, self.table, self.spans, Cuda(torch.device("cuda")))
        yield "exact", self.through(exact)

    def configs(self) -> Iterator[tuple[str, list[Launch]]]:
        usual = prompt_config(*HEADS, 2)
        for rows, warps, stages in ((128, 8, 3), (128, 8, 5), (64, 4, 3)):
            config = Config(rows, True, warps, stages)
            tiles = prompt_tiles(self.spans, rows * HEADS[1] // HEADS[0])
            sent = torch.tensor(tiles, dtype=torch.int32, device="cuda")
            mark = " (usual)" if config == usual else ""

            def launch(layer: int, config: Config = config, sent: torch.Tensor = sent) -> object:
                pools = (self.pool.k[layer], self.pool.v[layer])
                rest = (self.table, sent, self.scale, config)
                return exact_prompt_attention(self.inputs[0], *pools, *rest)

            yield f"{'/'.join(map(str, config))}{mark}", [partial(launch, 0), partial(launch, 1)]


class Rows:
    """Result lines of one case: times beside the first form's, bits beside the exact form's."""

    def __init__(self, results: Report, label: str, **fields: object) -> None:
        self.results, self.label, self.fields = results, label, fields
        self.first, self.wanted = 0.0, None  # type: float, torch.Tensor | None

    def add(self, path: str, launches: list[Launch], moved: int | None, operations: float) -> None:
        found: Any = launches[0]()
        us = graph_us(launches)
        self.first = self.first or us
        note = f"{us / self.first:.2f}, {operations / us / 1e6:.0f} TFLOP/s"
        if path == "exact":
            self.wanted = found
        elif self.wanted is not None and path != "pages" and not torch.equal(found, self.wanted):
            note += ", OTHER BITS"
        label, fields = f"{self.label} {path}", self.fields | {"path": path}
        self.results.add(label, "kernel_exact_attention_us", us, moved, note=note, **fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--configs", action="store_true", help="other divisions of the work, too")
    args = parser.parse_args()
    results = Report(args.output)
    for name, (batch, length, start) in PROMPTS.items():
        prompts = Prompts(batch, length, start)
        rows = Rows(results, name, batch=batch, tokens=length, start=start)
        for path, launches in [*prompts.forms(), *(prompts.configs() if args.configs else [])]:
            rows.add(path, launches, None, prompts.operations)
        del prompts, launches
    for nodes, batch, prefix in itertools.product(NODES, BATCHES, PREFIXES):
        if args.configs and prefix > 2048 and batch > 8:
            continue
        inputs = Inputs(batch, Mode(NANO_9B, nodes), prefix)
        rows = Rows(results, f"{nodes} x {batch}x{prefix}", batch=batch, nodes=nodes, prefix=prefix)
        operations = 4 * HEADS[0] * HEADS[2] * batch * nodes * prefix
        forms = [*tree_forms(inputs), *(tree_configs(inputs) if args.configs else [])]
        for path, launches in forms:
            rows.add(path, launches, inputs.bytes_moved, operations)
        del inputs, forms, launches


if __name__ == "__main__":
    main()
