"""How much of a decode step the GPU is at work, from a profiler's trace.

    python benchmark/gpu_busy.py --model-path benchmark/models/nemotron-nano-9b-v2 \\
        --load-format dummy --speculative-algorithm NONE --batch-size 1 32 --results FILE.jsonl

Flags as bench_one_batch's. The trace covers the decode steps of one batch; its first and last fifth
are left out. Busy is the time in which at least one kernel or copy runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from mamba_eagle.bench_one_batch import make_parser, synthetic_prompts
from mamba_eagle.config import EngineConfig, from_arguments
from mamba_eagle.core import PLAIN, SamplingParams
from mamba_eagle.eval import results
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.driver import Generation, InProcessDriver, greedy, sized_for

CUT = 0.2  # of the trace, at either end


class Busy(NamedTuple):
    share: float
    longest_gap: float  # microseconds
    kernels: int


def busy(intervals: Sequence[tuple[float, float]]) -> Busy:
    """Of work [begin, end) in microseconds, any order."""
    first, last = min(begin for begin, _ in intervals), max(end for _, end in intervals)
    low, high = first + CUT * (last - first), last - CUT * (last - first)
    inner = sorted((max(begin, low), min(end, high)) for begin, end in intervals)
    inner = [(begin, end) for begin, end in inner if begin < end]
    worked, longest, until = 0.0, 0.0, low
    for begin, end in inner:
        longest = max(longest, begin - until)
        worked += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Busy(worked / (high - low), max(longest, high - until), len(inner))


class TracedDriver(InProcessDriver):
    """Keeps the trace of the last batch's decode steps."""

    def _decode(self, sampling: SamplingParams, result: Generation) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as self.trace:
            super()._decode(sampling, result)

    def intervals(self) -> list[tuple[float, float]]:
        """What the device did, microseconds."""
        from torch.autograd import DeviceType

        events = [e for e in self.trace.events() if e.device_type == DeviceType.CUDA]
        return [(event.time_range.start, event.time_range.end) for event in events]


def main(argv: list[str] | None = None) -> None:
    parser: argparse.ArgumentParser = make_parser()
    args = parser.parse_args(argv)
    config = resolve(from_arguments(EngineConfig, args))
    if config.device == "cpu":
        sys.exit("error: --device cpu: only a GPU's work can be traced apart from the host's")
    import torch

    from mamba_eagle.runner.model_runner import ModelRunner

    longest = args.input_len[0] + args.output_len[0]
    config = sized_for(config, max(args.batch_size), longest)
    runner = ModelRunner(config)
    driver, facts = TracedDriver(runner, config), results.facts(config.device)
    name = "plain" if config.tree_shape == PLAIN else config.tree_shape.name
    for batch in args.batch_size:
        prompts = synthetic_prompts(config, runner.ready.vocab_size, batch, args.input_len[0])
        driver.generate(prompts, greedy(8))  # the first trace of a process is slow
        torch.cuda.synchronize()
        driver.generate(prompts, greedy(args.output_len[0]))
        found = busy(driver.intervals())
        print(
            f"{name}, batch {batch}: the GPU is busy {found.share:.1%} of the time, "
            f"{found.kernels} kernels, longest gap {found.longest_gap:.1f} us"
        )
        if args.results:
            line = {"name": "gpu_busy_share", "mode": name, "batch": batch}
            line |= {"value": round(found.share, 4), "longest_gap_us": round(found.longest_gap, 1)}
            results.append(args.results, [line | facts])


if __name__ == "__main__":
    main()
