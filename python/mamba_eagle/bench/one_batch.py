"""The measurements of bench_one_batch: a sweep, verify modes side by side, the correctness test."""

import argparse
import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch.profiler import ProfilerActivity, profile, supported_activities

from mamba_eagle.bench import experts, facts, report, results
from mamba_eagle.bench.batch import BatchEngine, Generation, greedy, sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.constrain.vocabulary import read_tokenizer
from mamba_eagle.core import PLAIN
from mamba_eagle.lora.peft import Pair
from mamba_eagle.lora.slots import AdapterSlots
from mamba_eagle.message import AdapterRead, LoadAdapter, ReadAdapter, Ready
from mamba_eagle.runner.leader import LeadingRunner, make_runner
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.scheduler.adapters import Adapters

SMALL = 1e-3  # so that states stay finite


class DummyAdapters:
    """The same numbers under several names, of the highest rank, for every matrix."""

    def __init__(self, count: int, slots: AdapterSlots) -> None:
        self.names, self.slots = [f"dummy-{i}" for i in range(count)], slots
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).mul_(SMALL).to(slots.dtype)

        pairs = {}
        for name, matrix in slots.additions.items():
            down = random(slots.max_rank, matrix.size.inputs)
            pairs[name] = Pair(down, random(matrix.size.outputs, slots.max_rank))
        self.adapter = pairs

    def load(self, adapters: Adapters) -> list[str]:
        """Into a scheduler that has none; returns their names."""
        for name in self.names:
            adapters.load(LoadAdapter(call_id=0, name=name, path=name))
        for asked in adapters.take_unsent():
            assert isinstance(asked, ReadAdapter)
            self.slots.keep(asked.number, self.adapter)
            adapters.read(AdapterRead(number=asked.number))
        return self.names


WARMUP_TOKENS = 8
MAX_SHOWN_DIFFERENCES = 5
VERIFY_MODES = EngineConfig.__dataclass_fields__["mamba_verify_mode"].metadata["choices"]

# (config, vocabulary size, batch size, length) -> token ids
MakePrompts = Callable[[EngineConfig, int, int, int], list[list[int]]]


def measure(args: argparse.Namespace, config: EngineConfig, make_prompts: MakePrompts) -> None:
    """What the flags in ``args`` ask for; ``config`` is resolved.

    Raises: ConfigError if the model cannot be loaded, ValueError if a batch does not fit.
    """
    machine = facts.facts(config.device)
    if args.compare_verify_modes:
        compare_verify_modes(args, config, make_prompts, machine)
    else:
        Sweep(args, config, make_prompts, machine).measure()


class Measured(NamedTuple):
    """A batch and what it was measured with."""

    made: Generation
    speed: report.Speed | None  # None: the output is one token, which the prompts' step makes
    ready: Ready


class Sweep:
    """Every combination of the batch sizes, input and output lengths in ``args``."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: EngineConfig,
        make_prompts: MakePrompts,
        machine: dict[str, Any],
    ) -> None:
        """machine: ``facts.facts`` of the device."""
        self.args, self.config, self.make_prompts = args, config, make_prompts
        self.machine = machine
        self.about = {"device": "", "commit": machine["commit"]}

    def measure(self) -> list[Measured]:
        """Measure all on one runner, print it and append it to the files that are asked for.

        Raises: as the function ``measure``.
        """
        args = self.args
        longest = max(args.input_len) + max(args.output_len)
        config = sized_for(self.config, max(args.batch_size), longest)
        config = dataclasses.replace(config, speculative_adaptive=False)  # every step has one shape
        runner = make_runner(config)
        self._introduce(runner)
        engine = BatchEngine(config, runner)
        if args.dummy_adapters:
            assert isinstance(runner, ModelRunner), "one device"
            dummies = DummyAdapters(args.dummy_adapters, runner.adapters)
            engine = BatchEngine(config, runner, dummies.load)
        sizes = itertools.product(args.batch_size, args.input_len, args.output_len)
        return [self._measure_batch(engine, *size) for size in sizes]

    def _introduce(self, runner: ModelRunner | LeadingRunner) -> None:
        self.about["device"] = facts.device_name(self.config.device)  # with the runner's threads
        print(f"device: {self.about['device']}; commit: {self.about['commit']}")
        shape, length = self.config.tree_shape, self.config.simulate_acc_len
        if shape != PLAIN:
            print(f"Each step drafts {shape.name}; a server may choose others or none")
        if isinstance(runner, ModelRunner) and runner.model.config.moe is not None:
            experts.watch(runner, self.args.dummy_routing)
        if length:
            print(
                f"SIMULATED: --simulate-acc-len forces {length} accepted tokens per step and "
                "request; drafts are not compared with the target, and texts mean nothing"
            )

    def _measure_batch(
        self, engine: BatchEngine, batch_size: int, input_len: int, output_len: int
    ) -> Measured:
        args, config, ready = self.args, self.config, engine.ready
        prompts = self.make_prompts(config, ready.vocab_size, batch_size, input_len)
        print("Warmup ...")  # each time: a kernel may be compiled for a batch size or a length
        engine.generate(prompts, greedy(min(output_len, WARMUP_TOKENS)))
        print(f"Benchmark ... batch {batch_size}, input {input_len}, output {output_len}")
        with profiled(args.profile, f"{args.run_name}-{batch_size}-{input_len}-{output_len}"):
            made = engine.generate(prompts, greedy(output_len))
        print("\n".join(report.report_lines(made)))
        speed = None
        if made.step_seconds:
            touched = 0.0
            if isinstance(engine.runner, ModelRunner):
                nodes = batch_size * config.tree_shape.nodes
                touched = experts.touched(engine.runner, nodes)
            speed = report.speed_of(made, config, ready, self.machine["copy_tb_s"], touched)
            print(speed.line())
        if args.result_filename:
            record = report.result_record(made, args, config, self.about)
            results.append(args.result_filename, [record])
        if args.results:
            lines = report.result_lines(made, speed, args, config, ready, self.machine)
            results.append(args.results, lines)
        return Measured(made, speed, ready)


@contextlib.contextmanager
def profiled(wanted: bool, name: str) -> Iterator[None]:
    """Write a trace for chrome://tracing or Perfetto to ``name``.trace.json.gz, if wanted."""
    if not wanted:
        yield
        return
    kinds = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    with profile(activities=kinds) as trace:
        yield
    trace.export_chrome_trace(f"{name}.trace.json.gz")
    print(f"Profile written to {name}.trace.json.gz")


# ── verify modes ─────────────────────────────────────────────────────────────────────────────


def compare_verify_modes(
    args: argparse.Namespace,
    config: EngineConfig,
    make_prompts: MakePrompts,
    machine: dict[str, Any],
) -> None:
    """The sweep in each mode, one after the other in this process; then both side by side.

    Raises: as ``measure``.
    """
    found = {}
    for mode in VERIFY_MODES:
        print(f"========== --mamba-verify-mode {mode} ==========")
        configured = dataclasses.replace(config, mamba_verify_mode=mode)
        found[mode] = Sweep(args, configured, make_prompts, machine).measure()
        release_memory()  # the next runner's pools may need it all
    print_modes(found)
    if config.simulate_acc_len:
        print("Acceptance is simulated: texts are not compared.")
        return
    for pair in zip(*found.values()):
        print(compared_texts(*(measured.made.tokens for measured in pair)))


def print_modes(found: dict[str, list[Measured]]) -> None:
    print(
        f"\n{'mode':<10}{'batch':>6}{'ms/step':>10}{'token/s':>10}{'accepted':>10}"
        f"{'state MB/request':>18}{'beside checkpoint':>19}"
    )
    for batch in zip(*found.values()):
        for mode, (made, speed, ready) in zip(found, batch):
            state = report.StateMemory.of(ready)
            step = (speed.seconds * 1e3, speed.tokens_per_second) if speed else (0.0, 0.0)
            print(
                f"{mode:<10}{len(made.tokens):>6}{step[0]:>10.3f}{step[1]:>10.1f}"
                f"{made.accept_length:>10.3f}{state.megabytes:>18.2f}{state.beside / 1e6:>19.2f}"
            )


def compared_texts(first: list[list[int]], second: list[list[int]]) -> str:
    """Whether two runs made the same tokens, and if not, where they part."""
    parts = [
        f"request {i} parts at output token {first_difference(a, b)}"
        for i, (a, b) in enumerate(zip(first, second))
        if a != b
    ]
    equal = len(first) - len(parts)
    text = f"Batch {len(first)}: {equal} of {len(first)} texts are equal in both modes"
    return "; ".join([text, *parts[:MAX_SHOWN_DIFFERENCES]])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token in which two different texts differ."""
    return next((k for k, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ── correctness ──────────────────────────────────────────────────────────────────────────────


def correctness_test(config: EngineConfig, texts: Sequence[str], max_new_tokens: int) -> bool:
    """Print what the model writes behind ``texts`` and, with speculation, whether plain decoding
    writes the same. Returns: False if it does not.

    Raises: ConfigError if the model cannot be loaded.
    """
    tokenizer = Tokenizer.from_str(read_tokenizer(config.tokenizer_path))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def generate(config: EngineConfig) -> Generation:
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        sized = sized_for(config, len(prompts), longest)
        return BatchEngine(sized, make_runner(sized)).generate(prompts, greedy(max_new_tokens))

    made = generate(config)
    for i, (text, tokens) in enumerate(zip(texts, made.tokens)):
        print(f"========== Prompt {i} ==========\n{text}{tokenizer.decode(tokens)}\n")
    if config.speculative_algorithm == "NONE":
        return True
    plain = generate(dataclasses.replace(config, speculative_algorithm="NONE"))
    for i, (drafted, expected) in enumerate(zip(made.tokens, plain.tokens)):
        if drafted != expected:
            at = first_difference(drafted, expected)
            print(f"Prompt {i}: speculation parts from plain decoding at output token {at}")
    if made.tokens != plain.tokens:
        return False
    print(f"Speculation ({made.accept_length:.3f} token/step) equals plain decoding.")
    return True
