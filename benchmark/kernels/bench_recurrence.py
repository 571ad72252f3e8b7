"""Times the recurrence's kernels on one Mamba2 layer, beside those of the dual form.

    PYTHONPATH=python python -m benchmark.kernels.bench_recurrence --output FILE.jsonl
    … --sweep    # tiles of all sizes

Steps and prompts as in bench_tree_verify.py and bench_prefill.py: graphs that go round the buffers
of more layers than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

from torch import Tensor

from benchmark.kernels.bench_prefill import Inputs as PromptInputs
from benchmark.lib.launches import Launch, Report, graph_us
from benchmark.lib.verify_inputs import Inputs, Mode, bytes_moved
from mamba_eagle.kernels.recurrence import gluon_prompts, gluon_verify
from mamba_eagle.kernels.recurrence.layout import Tiles

STEPS = tuple(
    itertools.product((1, 8, 16), (None, 1), (1, 8, 32))
)  # nodes, share that folds, batch
PROMPTS = {"1x2048": [2048], "32x256": [256] * 32, "1x8192": [8192]}
TILES = tuple(Tiles(tile, 0, warps) for tile, warps in ((8, 1), (16, 1), (16, 2), (16, 4)))


def steps(inputs: Inputs, tiles: Tiles | None = None) -> list[Launch]:
    def launch(layer: int) -> Tensor:
        rows, weights = inputs.buffers[layer], (inputs.C, inputs.A, inputs.D)
        given = (rows, *weights, inputs.state[layer], inputs.step, inputs.sizes)
        return gluon_verify.tree_verify(*given, tiles)

    return [partial(launch, layer) for layer in range(len(inputs.state))]


def prompts(inputs: PromptInputs, tiles: Tiles | None = None) -> list[Launch]:
    plan, launches = inputs.plan(), []
    for layer in range(len(inputs.state)):
        x, dt, B, C = inputs.convolved(layer, plan)
        args = (x, dt, inputs.A, B, C, inputs.D, inputs.state[layer], plan, tiles)
        launches.append(partial(gluon_prompts.scan, *args))
    return launches


def report(output: str | None, sweeping: bool) -> None:
    found = Report(output)
    for nodes, share, batch in STEPS:
        mode = Mode(nodes, share)
        inputs, fields = Inputs(batch, mode), {"nodes": nodes, "fold": share, "batch": batch}
        label = f"{nodes} nodes{', fold' if share else ''} {batch}"
        dual = graph_us(inputs.verify())
        for tiles in (None, *TILES) if sweeping else (None,):
            us = graph_us(steps(inputs, tiles))
            note = f"{us / dual:.2f} of the dual form's {dual:.1f}"
            found.add(
                f"{label} {tuple(tiles or ())}", "kernel_exact_verify_us", us,
                bytes_moved(batch, mode), note=note, dual_us=dual, tiles=tiles, **fields,
            )  # fmt: skip
        del inputs
    for name, lengths in PROMPTS.items():
        prompt = PromptInputs(lengths)
        dual = graph_us(prompt.scan(), 3)
        for tiles in (None, *TILES) if sweeping else (None,):
            us = graph_us(prompts(prompt, tiles), 3)
            note = f"{us / dual:.2f} of the dual form's {dual:.1f}"
            found.add(
                f"{name} {tuple(tiles or ())}", "kernel_exact_scan_us", us, prompt.scan_bytes,
                note=note, dual_us=dual, tiles=tiles, mode=name,
            )  # fmt: skip
        del prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", action="store_true", help="tiles of all sizes")
    args = parser.parse_args()
    report(args.output, args.sweep)


if __name__ == "__main__":
    main()
