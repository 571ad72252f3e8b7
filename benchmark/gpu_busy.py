"""How much of a decode step the GPU is at work, from a profiler's trace.

    python -m benchmark.gpu_busy --model-path benchmark/models/nemotron-nano-9b-v2 \\
        --load-format dummy --speculative-algorithm NONE --batch-size 1 32 --results FILE.jsonl

Flags are those of bench_one_batch. The trace covers the decode steps of one batch; its first and
last fifth are left out. Busy is the time in which at least one kernel or copy runs.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from benchmark.lib.gpu_trace import busy, device_intervals
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import BatchEngine, greedy, sized_for
from mamba_eagle.bench_one_batch import make_parser
from mamba_eagle.config import EngineConfig, from_arguments
from mamba_eagle.core import PLAIN
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner


def traced(engine: BatchEngine, prompts: list[list[int]], output_len: int) -> profile:
    """The decode steps of one batch."""
    run = engine.start(prompts, greedy(output_len))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run.finish()
    return trace


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    config = resolve(from_arguments(EngineConfig, args))
    if config.device == "cpu":
        sys.exit("error: --device cpu: only a GPU's work can be traced apart from the host's")
    config = sized_for(config, max(args.batch_size), args.input_len[0] + args.output_len[0])
    engine = BatchEngine(config, make_runner(config))
    machine = facts.facts(config.device)
    name = "plain" if config.tree_shape == PLAIN else config.tree_shape.name
    for batch in args.batch_size:
        prompts = synthetic_prompts(config, engine.ready.vocab_size, batch, args.input_len[0])
        traced(engine, prompts, 8)  # the first trace of a process is slow
        torch.cuda.synchronize()
        found = busy(device_intervals(traced(engine, prompts, args.output_len[0])))
        print(
            f"{name}, batch {batch}: the GPU is busy {found.share:.1%} of the time, "
            f"{found.kernels} kernels, longest gap {found.longest_gap:.1f} us"
        )
        if args.results:
            line = {"name": "gpu_busy_share", "mode": name, "batch": batch}
            line |= {"value": round(found.share, 4), "longest_gap_us": round(found.longest_gap, 1)}
            results.append(args.results, [line | machine])


if __name__ == "__main__":
    main()
