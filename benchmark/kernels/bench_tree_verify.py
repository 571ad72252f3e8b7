"""Times the Triton kernels of a verify step on one Mamba2 layer, beside the bytes they must move.

    PYTHONPATH=python python -m benchmark.kernels.bench_tree_verify --output FILE.jsonl
    … --sweep CONFIGS.jsonl    # triton.py's kernel, with its best configurations

Launches are captured in a CUDA graph that goes round the buffers of several layers, more than the
L2 cache holds, so that every state comes from memory, as it does in a model. ``floor`` is the time
in which the device's own copy moves the same bytes, measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial

import torch

from benchmark.lib.launches import Report, compile_all, graph_us
from benchmark.lib.verify_inputs import JOURNAL, NANO_9B, ROWS, Inputs, Mode, bytes_moved
from mamba_eagle.bench import results
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers
from mamba_eagle.kernels.tree_verify.triton import Config
from mamba_eagle.kernels.tree_verify.triton_fold import fold_journals

LAYERS = 27  # of Nemotron-Nano-9B-v2 are Mamba2
MODES = {
    "tree": Mode(16, None),
    "tree_fold": Mode(16, 1),
    "tree_fold_quarter": Mode(16, 0.25),
    "tree_fold_unused": Mode(16, 0),
    "decode": Mode(1, None),
    "decode_fold": Mode(1, 1),
    "decode_fold_unused": Mode(1, 0),
    "tree_8": Mode(8, None),
    "tree_8_fold": Mode(8, 1),
    "tree_8_fold_quarter": Mode(8, 0.25),  # as in a server, with 3 tokens accepted per step
    "tree_8_fold_unused": Mode(8, 0),
}
GOALS_US = {
    "tree": {1: 6, 8: 22, 32: 72},
    "tree_fold": {1: 9, 8: 40, 32: 140},
    "decode": {1: 4, 8: 19, 32: 66},
}


def measure_mode(
    found: Report, mode_name: str, batch: int, best: dict[tuple[str, int], Config]
) -> None:
    mode = MODES[mode_name]
    fields = {"mode": mode_name, "batch": batch, "nodes": mode.nodes, "rows": JOURNAL}
    inputs = Inputs(batch, mode)
    config = best.get((mode_name.removesuffix("_unused"), batch))
    verify = inputs.verify(config)
    found.add(
        f"verify {mode_name} {batch}",
        f"kernel_{mode_name}_us",
        graph_us(verify),
        bytes_moved(batch, mode),
        GOALS_US.get(mode_name, {}).get(batch),
        **fields,
        config=list(config) if config else None,
    )
    if mode_name not in ("tree", "decode"):
        return
    conv = inputs.conv()
    both = list(itertools.chain.from_iterable(zip(conv, verify)))
    others = {
        "conv": graph_us(conv),
        "norm": graph_us(inputs.norm()),
        "conv_and_verify": 2 * graph_us(both),
    }
    for name, us in others.items():
        found.add(f"{name} {mode_name} {batch}", f"kernel_{name}_us", us, **fields)


def measure_fold(found: Report, batch: int) -> None:
    """Journals of all layers, outside of a step."""
    H, P, G, N = NANO_9B
    row = H * P + G * N
    xB = torch.randn(LAYERS, batch, ROWS, row, device="cuda").bfloat16()
    dt = torch.rand(LAYERS, batch, ROWS, H, device="cuda") * 0.1
    state = torch.randn(LAYERS, batch, H, P, N, device="cuda")
    slots = torch.arange(batch, device="cuda")
    journal = torch.arange(JOURNAL, device="cuda").repeat(batch, 1)
    length = torch.full_like(slots, JOURNAL)
    folds = Folds(slots, slots, journal, length)
    args = (RowBuffers(xB, dt, -dt.cumsum(2)), state, folds, NANO_9B)
    found.add(
        f"fold of {LAYERS} layers {batch}",
        "kernel_fold_us",
        graph_us([partial(fold_journals, *args)]),
        LAYERS * batch * (2 * H * P * N * 4 + JOURNAL * (2 * row + 8 * H)),
        batch=batch,
        rows=JOURNAL,
        layers=LAYERS,
    )


def report(output: str | None, best: dict[tuple[str, int], Config]) -> None:
    found = Report(output)
    for batch in (1, 8, 32):
        measure_fold(found, batch)
    for mode_name, batch in itertools.product(MODES, (1, 8, 32, 128)):
        measure_mode(found, mode_name, batch, best)


CANDIDATES = list(itertools.starmap(Config, itertools.product((16, 32, 64), (False, True))))


def compile_share(share: list[tuple[str, Config]]) -> None:
    """In a process of its own: fills Triton's cache."""
    inputs = {}
    for mode_name, config in share:
        if mode_name not in inputs:
            inputs[mode_name] = Inputs(1, MODES[mode_name], layers=1)
        try:
            inputs[mode_name].verify(config)[0]()
        except Exception as error:
            print("compile", mode_name, tuple(config), repr(error)[:150])


def sweep(output: str | None, seconds: float) -> dict[tuple[str, int], Config]:
    start = time.monotonic()
    modes = ("tree", "decode", "tree_fold", "decode_fold", "tree_8", "tree_8_fold")
    jobs = [(mode_name, config) for mode_name in modes for config in CANDIDATES]
    compile_all(compile_share, jobs)
    print(f"compiled {len(jobs)} in {time.monotonic() - start:.0f} s")
    best = {}
    for mode_name, batch in itertools.product(modes, (32, 8, 1)):
        inputs, found = Inputs(batch, MODES[mode_name]), []
        for config in CANDIDATES:
            if time.monotonic() - start > seconds:
                print("out of time")
                break
            try:
                found.append((graph_us(inputs.verify(config), 7), config))
            except Exception as error:
                print(mode_name, batch, tuple(config), repr(error)[:100])
        if output:
            case = {"mode": mode_name, "batch": batch}
            results.append(output, [case | {"us": us, "config": list(c)} for us, c in found])
        found.sort(key=lambda timed: timed[0])
        if found:
            best[mode_name, batch] = found[0][1]
        shown = "  ".join(f"{us:.2f} {'/'.join(map(str, c))}" for us, c in found)
        print(f"{mode_name} {batch}: {shown}", flush=True)
        del inputs
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    parser.add_argument("--sweep", help="first find the best configurations; details to this file")
    parser.add_argument("--seconds", type=float, default=600, help="stop the sweep after this")
    args = parser.parse_args()
    report(args.output, sweep(args.sweep, args.seconds) if args.sweep else {})


if __name__ == "__main__":
    main()
