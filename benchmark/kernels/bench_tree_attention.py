"""Times the attention of one layer in a verify step, beside the bytes it must move.

    PYTHONPATH=python python -m benchmark.kernels.bench_tree_attention --output FILE.jsonl
    … --sweep CONFIGS.jsonl    # first find the Triton kernel's best configurations

The Triton kernel, and gathered keys in torch. Both write the new keys and values to the pool.
Launches go round the pools of several layers, as in bench_tree_verify.py; slots are scattered.
``lanes`` are those of a drafter: three new nodes behind nine old ones.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.lib.launches import ROTATED_BYTES, Launch, Report, compile_all, graph_us
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.torch.attention import PagedAttention
from mamba_eagle.bench import results
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_attention.triton import Config, choose_config, paged_tree_attention
from mamba_eagle.model_config import AttentionConfig

NANO_9B = AttentionConfig(num_heads=40, num_kv_heads=8, head_dim=128)
DRAFTER = AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=64)
CONTEXT = 32768  # positions of the slot table
BATCHES, PREFIXES = (1, 8, 32), (256, 2048, 8192)
CLOSE = 2e-2  # outputs of two paths: bfloat16 roundings of weights and of results


class Mode(NamedTuple):
    model: AttentionConfig
    nodes: int
    old: int = 0


MODES = {
    "decode": Mode(NANO_9B, 1),
    "tree_8": Mode(NANO_9B, 8),
    "tree_16": Mode(NANO_9B, 16),
    "lanes": Mode(DRAFTER, 3, 9),
}


class Inputs:
    """A step of ``batch`` requests with equal prefixes, and the pools of ``layers`` layers."""

    def __init__(self, batch: int, mode: Mode, prefix: int, layers: int = 0) -> None:
        model, T, E = mode.model, mode.nodes, mode.old + mode.nodes
        torch.manual_seed(0)
        self.mode, self.batch, self.prefix = mode, batch, prefix
        used = batch * (prefix + E)
        per_layer = used * model.num_kv_heads * model.head_dim * 4
        self.layers = layers or min(64, max(2, math.ceil(ROTATED_BYTES / per_layer)))
        device = torch.device("cuda")
        self.pool = KVPool(self.layers, used, model, torch.bfloat16, device)
        self.pool.k.normal_()
        self.pool.v.normal_()
        order = torch.randperm(used, device="cuda")
        self.own = order[: batch * E].view(batch, E).contiguous()
        self.table = torch.zeros(batch, CONTEXT, dtype=torch.int64, device="cuda")
        self.table[:, :prefix] = order[batch * E :].view(batch, prefix)
        self.slots = torch.arange(batch, device="cuda")
        self.lengths = torch.full((batch,), prefix, device="cuda")
        parents = [i if i < max(1, mode.old // 3) else (i - 1) // 3 for i in range(E)]
        seen = torch.eye(E, dtype=torch.bool)
        for i, parent in enumerate(parents):
            seen[i] |= seen[parent]
        self.ancestors = seen[mode.old :].cuda().expand(batch, -1, -1)  # [b, T, E]
        self.masks = pack_paths(self.ancestors)
        heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
        packed = torch.randn(batch * T, sum(heads), model.head_dim, device="cuda").bfloat16()
        self.q, self.k, self.v = packed.split(heads, dim=1)
        self.scale = model.head_dim**-0.5

    def triton(self, config: Config | None = None) -> list[Launch]:
        def launch(layer: int) -> Tensor:
            pools = (self.pool.k[layer], self.pool.v[layer])
            where = (self.table, self.slots, self.lengths, self.own, self.masks)
            return paged_tree_attention(self.q, self.k, self.v, *pools, *where, self.scale, config)

        return [partial(launch, layer) for layer in range(self.layers)]

    def through(self, attention: Any) -> list[Launch]:
        """``attention.attend`` of each layer."""
        layers = (SimpleNamespace(index=i, scale=self.scale) for i in range(self.layers))
        return [partial(attention.attend, layer, self.q, self.k, self.v) for layer in layers]

    def torch(self) -> list[Launch]:
        before = self.ancestors.new_ones(self.batch, self.mode.nodes, self.prefix)
        visible = torch.cat([before, self.ancestors], dim=2)
        bias = torch.zeros(visible.shape, device="cuda").masked_fill_(~visible, float("-inf"))
        read = torch.cat([self.table[:, : self.prefix], self.own], dim=1)
        new = self.own[:, self.mode.old :].reshape(-1)
        return self.through(PagedAttention(self.pool, new, read, bias))

    def paths(self, config: Config | None) -> Iterator[tuple[str, list[Launch]]]:
        yield "triton", self.triton(config)
        yield "torch", self.torch()

    @property
    def bytes_moved(self) -> int:
        """Each input once, each output once, in two bytes a number."""
        model, T, E = self.mode.model, self.mode.nodes, self.mode.old + self.mode.nodes
        keys = self.prefix + E + T  # the new ones are written, too
        row = 2 * model.num_kv_heads * model.head_dim
        return 2 * self.batch * (keys * row + 2 * T * model.num_heads * model.head_dim)


def usual_config(batch: int, mode: Mode) -> Config:
    c = mode.model
    return choose_config(batch, mode.nodes, c.num_heads, c.num_kv_heads, c.head_dim, CONTEXT, 2)


def report(output: str | None, best: dict[tuple[str, int], Config]) -> None:
    results, wrong = Report(output), []
    for (name, mode), batch, prefix in itertools.product(MODES.items(), BATCHES, PREFIXES):
        inputs = Inputs(batch, mode, prefix)
        config = best.get((name, batch)) or usual_config(batch, mode)
        wanted: Tensor | None = None
        for path, launches in inputs.paths(config):
            found: Any = launches[0]()
            wanted = found if wanted is None else wanted
            error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
            note = f"{error:.0e} from triton" if path != "triton" else "/".join(map(str, config))
            if not error < CLOSE:
                wrong.append(f"{name}, batch {batch}, prefix {prefix}: {path} is {note}")
            fields = {"mode": name, "path": path, "batch": batch, "nodes": mode.nodes}
            results.add(
                f"{name} {path} {batch}x{prefix}",
                "kernel_attention_us",
                graph_us(launches),
                inputs.bytes_moved,
                note=note,
                prefix=prefix,
                **fields,
            )
        del inputs, launches, found, wanted
    if wrong:
        raise SystemExit("paths differ:\n" + "\n".join(wrong))


def candidates(batch: int, mode: Mode) -> list[Config]:
    rows = mode.nodes * mode.model.num_heads // mode.model.num_kv_heads
    tiles, keys = [(16, 4), (16, 2)], (64, 128)
    if rows > 16:
        tiles, keys = [(64, 4), (128, 8) if rows > 64 else (16, 4)], (32, 64)
    found = {usual_config(batch, mode)}
    for (tile, warps), width, stages in itertools.product(tiles, keys, (2, 3)):
        programs = batch * mode.model.num_kv_heads * math.ceil(rows / tile)
        for wanted, least in itertools.product((132, 264, 528), (128, 512)):
            splits = 2 ** max(0, min(6, round(math.log2(wanted / programs))))
            found.add(Config(tile, width, splits, least, warps, stages))
    return sorted(found)


def compile_share(share: list[tuple[str, Config]]) -> None:
    """In a process of its own: fills Triton's cache."""
    inputs = {name: Inputs(1, mode, 64, layers=1) for name, mode in MODES.items()}
    for name, config in share:
        try:
            inputs[name].triton(config)[0]()
        except Exception as error:
            print("compile", name, tuple(config), repr(error)[:150])


def sweep(output: str, seconds: float) -> dict[tuple[str, int], Config]:
    """The configuration of each mode and batch with the least sum of time over floor: which prefix
    a batch has is not known when the kernel is launched."""
    start = time.monotonic()
    jobs: dict[tuple[object, ...], tuple[str, Config]] = {}
    for name, batch in itertools.product(MODES, BATCHES):
        for config in candidates(batch, MODES[name]):
            same_code = (name, *config._replace(splits=config.splits > 1, least=0))
            jobs[same_code] = (name, config)
    compile_all(compile_share, list(jobs.values()))
    print(f"compiled {len(jobs)} in {time.monotonic() - start:.0f} s")
    best = {}
    for name, batch in itertools.product(MODES, BATCHES):
        costs: dict[Config, list[float]] = {}
        for prefix in PREFIXES:
            inputs = Inputs(batch, MODES[name], prefix)
            for config in candidates(batch, MODES[name]):
                if time.monotonic() - start > seconds:
                    print("out of time")
                    return best
                try:
                    costs.setdefault(config, []).append(graph_us(inputs.triton(config), 5))
                except Exception as error:
                    print(name, batch, tuple(config), repr(error)[:100])
            del inputs
        whole = {config: times for config, times in costs.items() if len(times) == len(PREFIXES)}
        least = [min(times) for times in zip(*whole.values())]

        def cost(config: Config, times: dict = whole, least: list[float] = least) -> float:
            return sum(us / floor for us, floor in zip(times[config], least))

        ranked = sorted(whole, key=cost)
        best[name, batch] = ranked[0]
        case = {"mode": name, "batch": batch}
        results.append(output, [case | {"us": whole[c], "config": c} for c in ranked])
        usual = usual_config(batch, MODES[name])
        for config in [*ranked[:4], usual]:
            shown = " ".join(f"{us:.2f}" for us in whole[config])
            mark = " (usual)" if config == usual else ""
            print(f"{name} {batch}: {'/'.join(map(str, config))}: {shown}{mark}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", help="first find the best configurations; details to this file")
    parser.add_argument("--seconds", type=float, default=300, help="stop the sweep after this")
    args = parser.parse_args()
    report(args.output, sweep(args.sweep, args.seconds) if args.sweep else {})


if __name__ == "__main__":
    main()
