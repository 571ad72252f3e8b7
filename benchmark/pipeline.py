"""Tokens per second of pipeline stages that work at the same time, and of the same ones in turns.

    python -m benchmark.pipeline --pp-size 2 --clients 1 8 --stage-ms 4 --row-us 500

On a CPU, a process per stage, over gloo. With ``--stage-ms`` and ``--row-us`` each stage also
sleeps for so long per pass and per row (token or node) of it, in place of a device of its own that
reads weights and computes: stages that share a few busy cores would show the machine's load
instead. Numbers of cohorts take turns, a round of all requests each; the table has medians of the
rounds, and how much of the time stages spent in their layers, prompts and ends of rounds included.
One cohort is one plan at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from benchmark.lib.rounds import Contestant, Round, play_rounds
from mamba_eagle.bench import results
from mamba_eagle.bench.batch import greedy, sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.message import Generate, Plan, Ready, StepResult
from mamba_eagle.offline import OfflineEngine
from mamba_eagle.resolve import resolve

INPUT, OUTPUT = 8, 96
MIDDLE = (0.1, 0.75)  # part of a round's tokens whose time counts
WAIT_SECONDS = 120.0
RESET = Plan(step=0)  # waits for all steps before; the next scheduler begins to count again


@dataclass(frozen=True)
class BusyRound(Round):
    busy: tuple[float, ...] = ()  # share of the round that each stage spent in its layers


class Sleep(NamedTuple):
    """Seconds of a stage's pass."""

    each: float
    per_row: float


def serve(rank: int, config: EngineConfig, file: str, sleep: Sleep, links: Links) -> None:
    """A stage, as runner/process.py serves it."""
    import torch

    from mamba_eagle.devices import set_threads
    from mamba_eagle.runner.assemble import assemble
    from mamba_eagle.runner.ranks import Ranks

    set_threads(1, torch.device("cpu"))
    runner = assemble(config, Ranks(stages=join(rank, config.pp_size, file)))
    own = runner.model.run_layers
    busy = 0.0

    def run_layers(layers: Any, hidden: Any, *others: Any) -> Any:
        nonlocal busy
        began, rows = time.perf_counter(), len(hidden)
        made = own(layers, hidden, *others)
        time.sleep(sleep.each + sleep.per_row * rows)
        busy += time.perf_counter() - began
        return made

    runner.model.run_layers = run_layers  # type: ignore[method-assign, assignment]
    plans, answers = links.plans[rank], links.answers
    if runner.model.config.is_last_stage:
        answers.put(runner.ready)
    received: deque[Plan | None] = deque()
    while True:
        if not received:
            received.append(plans.get())
        while runner.drafts_ahead and not plans.empty():
            received.append(plans.get())
        runner.look_ahead([plan for plan in received if plan is not None])
        plan = received.popleft()
        if plan is None:
            return
        step = runner.launch(plan)
        if plan.step == 0:
            links.busy.put((rank, busy))
            busy = 0.0
        if runner.model.config.is_last_stage:
            answers.put(step.result())


def join(rank: int, size: int, file: str) -> Any:
    import torch

    from mamba_eagle.parallel.distributed import FileMeeting, ProcessGroup, meet
    from mamba_eagle.parallel.shard import Shard

    device = torch.device("cpu")
    meet(Shard(rank, size), device, FileMeeting(file))
    group = ProcessGroup(Shard(rank, size), device, [range(size)])
    group.connect()
    return group


class Links:
    """The queues between this process and the stages."""

    def __init__(self, context: Any, stages: int) -> None:
        self.plans = [context.Queue() for _ in range(stages)]
        self.answers, self.busy = context.Queue(), context.Queue()


class Answer:
    def __init__(self, links: Links) -> None:
        self.links = links

    def result(self) -> StepResult:
        return self.links.answers.get(timeout=WAIT_SECONDS)


class Stages:
    """All stages, as the runner of an OfflineEngine."""

    overlaps = True

    def __init__(self, links: Links, ready: Ready, cohorts: int) -> None:
        self.links, self.ready = links, msgspec.structs.replace(ready, cohorts=cohorts)

    def launch(self, plan: Plan) -> Answer:
        for plans in self.links.plans:
            plans.put(plan)
        return Answer(self.links)

    def reset(self) -> list[float]:
        """Ends what is open. Returns the seconds that each stage has worked since the last time."""
        self.launch(RESET).result()
        found = dict(self.links.busy.get(timeout=WAIT_SECONDS) for _ in self.links.plans)
        return [found[rank] for rank in sorted(found)]


def play(config: EngineConfig, prompts: Sequence[list[int]], stages: Stages) -> BusyRound:
    """Serve all prompts at once."""
    stages.reset()
    engine = OfflineEngine(config, stages)
    for number, prompt in enumerate(prompts):
        engine.add(Generate(rid=str(number), token_ids=prompt, sampling=greedy(OUTPUT)))
    began, tokens, steps = time.perf_counter(), 0, 0
    made: list[tuple[float, int]] = []  # seconds, tokens so far; after each step
    while not engine.idle:
        for output in engine.step():
            tokens += len(output.token_ids)
            steps += output.verify_steps if output.finish else 0
        made.append((time.perf_counter() - began, tokens))
    total = time.perf_counter() - began
    busy = tuple(worked / total for worked in stages.reset())
    # without prompts, and without the end, when fewer requests are left
    (first, before), *_, (last, after) = [
        each for each in made if MIDDLE[0] * tokens <= each[1] <= MIDDLE[1] * tokens
    ]
    return BusyRound(after - before, last - first, round(steps * (after - before) / tokens), busy)


def measure(args: argparse.Namespace) -> list[results.Line]:
    config = resolve(
        replace(
            EngineConfig(device="cpu", pp_size=args.pp_size, disable_radix_cache=True),
            speculative_adaptive=False,
            speculative_algorithm="NONE" if args.plain else "auto",
        )
    )
    config = sized_for(config, max(args.clients), INPUT + OUTPUT)
    context = mp.get_context("spawn")
    links, lines = Links(context, args.pp_size), []
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "ranks")
        sleep = Sleep(args.stage_ms / 1e3, args.row_us / 1e6)
        given = [(rank, config, meeting, sleep, links) for rank in range(args.pp_size)]
        ranks = [context.Process(target=serve, args=each, daemon=True) for each in given]
        for process in ranks:
            process.start()
        ready = links.answers.get(timeout=WAIT_SECONDS)
        ways = [
            Contestant[Stages, BusyRound](f"{cohorts} cohorts", Stages(links, ready, cohorts))
            for cohorts in args.cohorts or (1, args.pp_size, args.pp_size + 1)
        ]
        sleeps = f"{args.stage_ms:g} ms per pass, {args.row_us:g} us per row"
        print(f"{args.pp_size} stages, tree {config.tree_shape.name}; each sleeps {sleeps}")
        for clients in args.clients:
            prompts = synthetic_prompts(config, ready.vocab_size, clients, INPUT)
            play_rounds(ways, partial(play, config, prompts), 1)  # compiles kernels
            play_rounds(ways, partial(play, config, prompts), args.rounds)
            lines += [line(args, config, clients, way, ways[0]) for way in ways]
        for plans in links.plans:
            plans.put(None)
        for process in ranks:
            process.join(WAIT_SECONDS)
    return lines


def line(
    args: argparse.Namespace,
    config: EngineConfig,
    clients: int,
    way: Contestant[Stages, BusyRound],
    base: Contestant[Stages, BusyRound],
) -> results.Line:
    """Also prints it."""
    busy = [
        statistics.median(each.busy[stage] for each in way.rounds) for stage in range(args.pp_size)
    ]
    ratio = statistics.median(way.ratios(base))
    shares = " ".join(f"{share:.2f}" for share in busy)
    print(
        f"{clients:3} clients, {way.name:16} {way.median_speed:8.1f} tok/s, {ratio:5.2f} times, "
        f"busy {shares}, {way.rounds[0].accept_length:.2f} tokens per step",
        flush=True,
    )
    return {
        "name": "pipeline_tokens_per_s",
        "stages": args.pp_size,
        "stage_ms": args.stage_ms,
        "row_us": args.row_us,
        "tree": config.tree_shape.name,
        "clients": clients,
        "way": way.name,
        "value": round(way.median_speed, 1),
        "ratio": round(ratio, 3),
        "busy": [round(share, 3) for share in busy],
        "rounds": args.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pp-size", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cohorts", type=int, nargs="+", help="default: 1, stages, stages + 1")
    parser.add_argument("--stage-ms", type=float, default=0.0, help="sleep per pass")
    parser.add_argument("--row-us", type=float, default=0.0, help="sleep per row of a pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="without a drafter")
    parser.add_argument("--results", default="", help="append lines as in benchmark/results")
    args = parser.parse_args()
    lines = measure(args)
    if args.results:
        results.append(args.results, lines)


if __name__ == "__main__":
    main()
