"""CPU throughput beside llama.cpp: the same geometries with random weights, at the same bits.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python
    python benchmark/cpu_vs_llama.py --folder /tmp/models --llama-python /tmp/llama/bin/python

llama.cpp is built with g++ and cmake, and lives in an environment of its own. --folder gets the
random checkpoints; the GGUF files beside them are made by llama.cpp's converter and quantizer. Each
measurement is a process, and the contestants take turns. Without
--llama-python only ours are measured. Decode throughput is batch size over the median step, prompt
throughput that of prompts one after the other. Appends lines to benchmark/results/cpu.jsonl.
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
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import BatchEngine, greedy, sized_for
from mamba_eagle.bench.rounds import Contestant, Round, play_rounds
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval.prompts import synthetic_prompts
from mamba_eagle.resolve import resolve

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
PEER = Path(__file__).parent / "peers" / "llama_cpp_decode.py"
BITS = {"16": "auto", "8": "int8", "4": "int4"}  # ours, by bits of a weight
FORMATS = {"16": "f16", "8": "Q8_0", "4": "Q4_0"}  # llama.cpp's


class Job(NamedTuple):
    model: str
    bits: str
    threads: int
    batch: int
    input_len: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.bits}bit-t{self.threads}-b{self.batch}-p{self.input_len}"


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


def gguf(folder: Path, name: str, bits: str) -> Path:
    """The same weights as a GGUF file, all matrices in the format of these bits.

    Raises: SystemExit if it has not been made.
    """
    path = folder / f"{name}-{FORMATS[bits]}.gguf"
    if not path.exists():
        whole = folder / f"{name}-f16.gguf"
        raise SystemExit(
            f"{path} is missing. Make it with llama.cpp's tools from the checkpoint in "
            f"{folder / name}: convert_hf_to_gguf.py --outtype f16 --outfile {whole} (the "
            "vocabulary may be none), then llama-quantize --pure FROM TO FORMAT"
        )
    return path


# ── one measurement ──────────────────────────────────────────────────────────────────────────


def measure_ours(folder: str, job: Job) -> dict[str, Any]:
    """In a process of its own."""
    from mamba_eagle.kernels.threads import set_threads
    from mamba_eagle.layers.weights import weight_bytes
    from mamba_eagle.runner.model_runner import ModelRunner

    logging.disable(logging.WARNING)
    set_threads(job.threads)
    config = EngineConfig(
        model_path=str(Path(folder) / job.model),
        tokenizer_path=str(Path(folder) / job.model),
        device="cpu",
        quantization=BITS[job.bits],
        cpu_threads=job.threads,
        speculative_algorithm="NONE",
    )
    config = sized_for(resolve(config), job.batch, job.input_len + job.steps + 1)
    begin = time.perf_counter()
    runner = ModelRunner(config)
    load = time.perf_counter() - begin
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    engine = BatchEngine(config, runner)
    prompts = synthetic_prompts(config, runner.ready.vocab_size, job.batch, job.input_len)
    engine.generate(prompts, greedy(4))  # warm-up
    made = engine.generate(prompts, greedy(job.steps + 1))
    return {
        "prompt_seconds": [made.prefill_seconds / job.batch] * job.batch,
        "step_seconds": made.step_seconds,
        "load_seconds": load,
        "rss_mb": rss,
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "weight_mb": weight_bytes(runner.model) / 1e6,
    }


class Player(NamedTuple):
    engine: str  # ours or llama.cpp
    job: Job
    command: list[str]
    made: list[dict[str, Any]]

    def play(self) -> Round:
        threads = {"OMP_NUM_THREADS": str(self.job.threads), "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            self.command, env={**os.environ, **threads}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(self.command)}:\n{done.stderr[-2000:]}")
        made = json.loads(done.stdout.splitlines()[-1])
        self.made.append(made)
        return Round(self.job.batch * len(made["step_seconds"]), sum(made["step_seconds"]))


def contestants(args: argparse.Namespace) -> list[Contestant[Player, Round]]:
    found = []
    for model in args.models:
        checkpoint(args.folder, model)
        for bits in args.bits:
            for threads in args.threads:
                for batch, input_len in [(b, 64) for b in args.batch_size] + [(1, 512)]:
                    job = Job(model, bits, threads, batch, input_len, args.steps)
                    sizes = [str(part) for part in (threads, batch, input_len, args.steps)]
                    own = [sys.executable, __file__, "--measure", json.dumps(job)]
                    players = [Player("ours", job, [*own, "--folder", str(args.folder)], [])]
                    if args.llama_python:
                        file = str(gguf(args.folder, model, bits))
                        command = [args.llama_python, str(PEER), file, *sizes]
                        players.append(Player("llama.cpp", job, command, []))
                    found += [Contestant(f"{p.engine}-{job.name}", p) for p in players]
    return found


def line_of(player: Player) -> results.Line:
    job, made = player.job, player.made
    steps = [seconds for each in made for seconds in each["step_seconds"]]
    prompts = [seconds for each in made for seconds in each["prompt_seconds"]]
    line = {
        "name": f"{player.engine}-{job.name}",
        "mode": player.engine,
        **job._asdict(),
        "value": round(job.batch / median(steps), 2),
        "unit": "token/s",
        "median_step_ms": round(1e3 * median(steps), 3),
        "mean_step_ms": round(1e3 * mean(steps), 3),
        "prompt_tokens_per_second": round(job.input_len / median(prompts), 1),
        "rounds": len(made),
    }
    for key in ("load_seconds", "rss_mb", "max_rss_mb", "weight_mb"):
        if key in made[0]:
            line[key] = round(median(each[key] for each in made), 2)
    return line


def report(field: list[Contestant[Player, Round]], about: dict[str, Any]) -> list[results.Line]:
    """Prints a row per job; returns the result lines."""
    lines = [line_of(each.player) for each in field]
    theirs = {Job(*(line[key] for key in Job._fields)): line
              for line in lines if line["mode"] == "llama.cpp"}  # fmt: skip
    print(f"{'':48} {'token/s':>9} {'ratio':>6} {'prompt/s':>9} {'ratio':>6} {'load s':>7}")
    for line in lines:
        peer = theirs.get(Job(*(line[key] for key in Job._fields)))
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
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", default="", help="empty: measure ours alone")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result-filename", default=str(RESULTS), help="empty: keep nothing")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.measure:
        print(json.dumps(measure_ours(args.folder, Job(*json.loads(args.measure)))))
        return
    field = contestants(args)
    play_rounds(field, Player.play, args.rounds)
    about = {"cpu": facts.cpu_model(), "torch": torch.__version__}
    about |= {"commit": facts.commit(), "date": facts.today()}
    lines = report(field, about)
    if args.result_filename:
        results.append(args.result_filename, lines)


if __name__ == "__main__":
    main()
