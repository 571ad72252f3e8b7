"""CPU throughput beside llama.cpp: the same geometries with random weights, at the same bits.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python
    pip download --no-deps --no-binary=:all: llama-cpp-python   # and unpack it: the converter
    python -m benchmark.cpu_vs_llama --folder /tmp/models --llama-python /tmp/llama/bin/python \
        --llama-source llama_cpp_python-VERSION/vendor/llama.cpp

llama.cpp is built with g++ and cmake, and lives in an environment of its own. --folder gets the
random checkpoints and the GGUF files made of them. A process measures one engine, model, number of
bits and number of threads, in all shapes; processes take turns. Without --llama-python only ours
are measured. Decode throughput is batch size over the median step, prompt throughput that of a
batch of one. Batches of more requests follow short prompts: a recurrent state has no length.
Appends lines to benchmark/results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from benchmark.lib.processor import cpu_features
from benchmark.lib.rounds import Contestant, Round, play_rounds
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import BatchEngine, greedy, sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval.gsm8k import synthetic_prompts
from mamba_eagle.resolve import resolve

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
PEERS = Path(__file__).parent / "peers"
BITS = {"16": "auto", "8": "int8", "4": "int4"}  # ours, by bits of a weight
FORMATS = {"16": "F16", "8": "Q8_0", "4": "Q4_0"}  # llama.cpp's
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
BATCH_PROMPT = 16  # tokens of prompts in batches of more than one


class Shape(NamedTuple):
    batch: int
    input_len: int


class Job(NamedTuple):
    """What one process measures."""

    model: str
    bits: str
    threads: int
    steps: int
    shapes: tuple[Shape, ...]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.bits}bit-t{self.threads}"


# ── random checkpoints of published geometries ───────────────────────────────────────────────


def make_mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(
            num_heads=24,
            head_dim=64,
            vocab_size=50288,
            hidden_size=768,
            state_size=128,
            num_hidden_layers=24,
            n_groups=1,
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def make_granite() -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    kinds = ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)]
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            vocab_size=100352,
            hidden_size=768,
            intermediate_size=2048,
            shared_intermediate_size=2048,
            num_hidden_layers=32,
            num_attention_heads=12,
            num_key_value_heads=4,
            layer_types=kinds,
            mamba_n_heads=48,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_head=32,
            mamba_expand=2,
            num_local_experts=0,
            num_experts_per_tok=0,
            tie_word_embeddings=True,
            position_embedding_type="nope",
            embedding_multiplier=12,
            attention_multiplier=0.015625,
            residual_multiplier=0.246,
            logits_scaling=3.0,
            max_position_embeddings=32768,
            initializer_range=0.1,
            bos_token_id=100257,
            eos_token_id=100257,
            pad_token_id=100256,
        )
    )


MODELS = {"mamba2-130m": make_mamba2, "granite-4.0-h-350m": make_granite}


def checkpoint(folder: Path, name: str) -> Path:
    """The folder of a random checkpoint in bfloat16, written at the first call."""
    path = folder / name
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        MODELS[name]().to(torch.bfloat16).save_pretrained(path)
    return path


def files(folder: Path, name: str, bits: list[str], llama_python: str, source: str) -> None:
    """Writes the checkpoint and the GGUF files that are missing.

    Raises: subprocess.CalledProcessError if llama.cpp's tools fail.
    """
    checkpoint(folder, name)
    if not llama_python:
        return
    tool, whole = str(PEERS / "llama_cpp_files.py"), gguf(folder, name, "16")
    if not whole.exists():
        if not source:
            raise SystemExit(
                f"{whole} is missing: --llama-source names the converter that makes it"
            )
        command = [sys.executable, tool, "convert", source, str(folder / name), str(whole)]
        subprocess.run(command, check=True)
    for each in bits:
        if not (file := gguf(folder, name, each)).exists():
            command = [llama_python, tool, "quantize", str(whole), str(file), FORMATS[each]]
            subprocess.run(command, check=True)


def gguf(folder: Path, name: str, bits: str) -> Path:
    """The same weights as a GGUF file, all matrices in the format of these bits."""
    return folder / f"{name}-{FORMATS[bits]}.gguf"


# ── one measurement ──────────────────────────────────────────────────────────────────────────


def measure_ours(
    folder: str, job: Job, prompt_dtype: str, quantize_lm_head: bool
) -> dict[str, Any]:
    """In a process of its own."""
    from mamba_eagle.layers.weights import weight_bytes
    from mamba_eagle.runner.leader import make_runner

    logging.disable(logging.WARNING)
    path = str(Path(folder) / job.model)
    config = EngineConfig(
        model_path=path,
        device="cpu",
        quantization=BITS[job.bits],
        quantize_lm_head=quantize_lm_head,
        cpu_prompt_dtype=prompt_dtype,
        cpu_threads=job.threads,
        speculative_algorithm="NONE",
    )
    longest = max(shape.input_len for shape in job.shapes)
    largest = max(shape.batch for shape in job.shapes)
    # random weights have no tokenizer, and to look for one is to import transformers meanwhile
    config = replace(resolve(config), tokenizer_path="")
    config = sized_for(config, largest, longest + job.steps + 1)
    cpu, begin = time.process_time(), time.perf_counter()
    runner = make_runner(config)
    load, load_cpu = time.perf_counter() - begin, time.process_time() - cpu
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    engine = BatchEngine(config, runner)
    made: dict[str, Any] = {"load_seconds": load, "load_cpu_seconds": load_cpu, "rss_mb": rss}
    made["weight_mb"] = weight_bytes(runner.model) / 1e6
    made["shapes"] = []
    for shape in job.shapes:
        prompts = synthetic_prompts(config, runner.ready.vocab_size, *shape)
        engine.generate(prompts, greedy(3))  # warm-up
        found = engine.generate(prompts, greedy(job.steps + 1))
        seconds = found.prefill_seconds / shape.batch
        made["shapes"].append({"prompt_seconds": [seconds], "step_seconds": found.step_seconds})
    made["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return made


class Player(NamedTuple):
    engine: str  # ours, ours-bf16, ours-head or llama.cpp
    job: Job
    command: list[str]
    made: list[dict[str, Any]]

    def play(self) -> Round:
        # ours waits as its server does, llama.cpp as it likes
        waiting = {"OMP_WAIT_POLICY": "passive", **os.environ}
        if self.engine == "llama.cpp":
            waiting = {name: value for name, value in os.environ.items() if name not in WAITING}
        threads = {**waiting, "OMP_NUM_THREADS": str(self.job.threads)}
        done = subprocess.run(self.command, env=threads, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(self.command)}:\n{done.stderr[-2000:]}")
        made = json.loads(done.stdout.splitlines()[-1])
        self.made.append(made)
        steps = [each["step_seconds"] for each in made["shapes"]]
        found = zip(self.job.shapes, steps, strict=True)
        return Round(sum(shape.batch * len(each) for shape, each in found), sum(map(sum, steps)))


def contestants(args: argparse.Namespace) -> list[Contestant[Player, Round]]:
    found = []
    shapes = [Shape(1, length) for length in args.input_len]
    shapes += [Shape(batch, BATCH_PROMPT) for batch in args.batch_size if batch > 1]
    given = [f"{shape.batch}:{shape.input_len}" for shape in shapes]
    for model in args.models:
        files(args.folder, model, args.bits, args.llama_python, args.llama_source)
        for bits in args.bits:
            for threads in args.threads:
                job = Job(model, bits, threads, args.steps, tuple(shapes))
                own = [sys.executable, "-m", "benchmark.cpu_vs_llama", "--measure", json.dumps(job)]
                own += ["--folder", str(args.folder)]
                players = [Player("ours", job, own, [])]
                if args.bfloat16_prompts and bits == "16":
                    short = [*own, "--cpu-prompt-dtype", "bfloat16"]
                    players.append(Player("ours-bf16", job, short, []))
                if args.quantize_lm_head and bits == "4":
                    whole = [*own, "--quantize-lm-head"]
                    players.append(Player("ours-head", job, whole, []))
                if args.llama_python:
                    file, peer = gguf(args.folder, model, bits), PEERS / "llama_cpp_decode.py"
                    sizes = [str(threads), str(args.steps), *given]
                    command = [args.llama_python, str(peer), str(file), *sizes]
                    players.append(Player("llama.cpp", job, command, []))
                found += [Contestant(f"{p.engine}-{job.name}", p) for p in players]
    return found


# ── what it gives ────────────────────────────────────────────────────────────────────────────


def lines_of(player: Player) -> list[results.Line]:
    """One per shape."""
    job, made = player.job, player.made
    found = []
    for i, shape in enumerate(job.shapes):
        rounds = [each["shapes"][i] for each in made]
        steps = [seconds for each in rounds for seconds in each["step_seconds"]]
        prompts = [seconds for each in rounds for seconds in each["prompt_seconds"]]
        line = {
            "name": f"{player.engine}-{job.name}-b{shape.batch}-p{shape.input_len}",
            "mode": player.engine,
            "model": job.model,
            "bits": job.bits,
            "threads": job.threads,
            **shape._asdict(),
            "steps": job.steps,
            "value": round(shape.batch / median(steps), 2),
            "unit": "token/s",
            "median_step_ms": round(1e3 * median(steps), 3),
            "mean_step_ms": round(1e3 * mean(steps), 3),
            "prompt_tokens_per_second": round(shape.input_len / median(prompts), 1),
            "rounds": len(made),
        }
        for key in ("load_seconds", "load_cpu_seconds", "rss_mb", "max_rss_mb", "weight_mb"):
            if key in made[0]:
                line[key] = round(median(each[key] for each in made), 2)
        found.append(line)
    return found


def key_of(line: results.Line) -> tuple[Any, ...]:
    return tuple(line[key] for key in ("model", "bits", "threads", "batch", "input_len"))


def report(field: list[Contestant[Player, Round]], about: dict[str, Any]) -> list[results.Line]:
    """Prints a row for each of the lines that it returns."""
    lines = [line for each in field for line in lines_of(each.player)]
    theirs = {key_of(line): line for line in lines if line["mode"] == "llama.cpp"}
    print(f"{'':48} {'token/s':>9} {'ratio':>6} {'prompt/s':>9} {'ratio':>6} {'load s':>7}")
    for line in lines:
        peer = theirs.get(key_of(line))
        ratios = []
        for key in ("value", "prompt_tokens_per_second"):
            ratio = line[key] / peer[key] if peer is not None else None
            ratios.append("" if ratio is None else f"{ratio:.2f}")
            if ratio is not None:
                line[f"{key}_ratio_to_llama"] = round(ratio, 3)
        print(
            f"{line['name']:48} {line['value']:>9.1f} {ratios[0]:>6} "
            f"{line['prompt_tokens_per_second']:>9.1f} {ratios[1]:>6} {line['load_seconds']:>7.2f}"
        )
    return [{**line, **about} for line in lines]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and GGUF files")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--bits", nargs="+", default=list(BITS), choices=list(BITS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--input-len", type=int, nargs="+", default=[64, 512], help="of one prompt")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, help="begin no round that would end later")
    parser.add_argument("--llama-python", default="", help="empty: measure ours alone")
    parser.add_argument("--llama-source", default="", help="has llama.cpp's converter")
    parser.add_argument("--files-only", action="store_true", help="make the files, measure nothing")
    parser.add_argument(
        "--bfloat16-prompts", action="store_true", help="ours with --cpu-prompt-dtype bfloat16, too"
    )
    parser.add_argument(
        "--quantize-lm-head",
        action="store_true",
        help="ours with an lm_head of 4 bits, too, as in llama.cpp's files; else it has 8",
    )
    parser.add_argument("--cpu-prompt-dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result-filename", default=str(RESULTS), help="empty: keep nothing")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.measure:
        *sizes, shapes = json.loads(args.measure)
        job = Job(*sizes, shapes=tuple(Shape(*each) for each in shapes))
        how = (args.cpu_prompt_dtype, args.quantize_lm_head)
        print(json.dumps(measure_ours(args.folder, job, *how)))
        return
    field = contestants(args)
    if args.files_only:
        return
    play_rounds(field, Player.play, args.rounds, args.max_seconds)
    about = {"cpu": facts.cpu_model(), "cpu_features": cpu_features()}
    about |= {"torch": torch.__version__, "commit": facts.commit(), "date": facts.today()}
    lines = report(field, about)
    if args.result_filename:
        results.append(args.result_filename, lines)


if __name__ == "__main__":
    main()
