"""CPU throughput beside transformers: same checkpoint, same process, same number of threads.

    python -m benchmark.cpu_vs_transformers --threads 2 [--quantization auto int8 int4] [--ngram]

Greedy, float32, a fixed number of new tokens (stop tokens are ignored), prefill included in the
time. The same prompts for each batch size, answered so many at a time, since how many drafts are
accepted in one text is chance. Ours is the model runner's time: in a server the scheduler works
beside it. Repetitions of the contestants alternate, so that a slow minute of the machine hits all;
the best one of each counts.
The tokens of both sides are compared, too. With --quantization ours are measured in several kinds
of weights, and with --ngram the n-gram drafter on problems that the prompt has already solved,
beside plain decoding of those.
Appends one JSON line per measurement to benchmark/results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import transformers

from benchmark.lib.processor import cpu_features
from benchmark.lib.rounds import Contestant, Round, play_rounds
from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import BatchEngine, greedy, sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval import gsm8k
from mamba_eagle.eval.gsm8k import load_tokenizer, synthetic_prompts
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
PEER = "transformers"
# Beside the chains that are drafted on a CPU by default.
TREE = {
    "speculative_eagle_topk": 2,
    "speculative_num_steps": 5,
    "speculative_num_draft_tokens": 8,
}
REPEATING_LEN = 224  # tokens of a prompt whose answer is in it

Prompts = list[list[int]]


@dataclass(frozen=True)
class BatchRound(Round):
    texts: list[list[int]] = field(kw_only=True)
    tokens_per_step: float = 1.0  # of a request
    step_ms: float | None = None  # mean decode step of the whole batch


class Player(NamedTuple):
    mode: str  # transformers, plain, eagle, tree, plain-int8 …, ngram-repeating
    plain: str  # the mode that it is compared with
    batch: int
    prompts: Prompts
    answer: Callable[[Prompts], BatchRound]

    def play(self) -> BatchRound:
        b = self.batch
        rounds = [self.answer(self.prompts[i : i + b]) for i in range(0, len(self.prompts), b)]
        steps = [each.step_ms for each in rounds if each.step_ms is not None]
        return BatchRound(
            sum(each.tokens for each in rounds),
            sum(each.seconds for each in rounds),
            texts=[text for each in rounds for text in each.texts],
            tokens_per_step=len(rounds) / sum(1 / each.tokens_per_step for each in rounds),
            step_ms=mean(steps) if steps else None,
        )


def peer(folder: str, new_tokens: int) -> Callable[[Prompts], BatchRound]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    # Ours ignores stop tokens; without these there is nothing that could end the peer early either.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def answer(prompts: Prompts) -> BatchRound:
        begin = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                use_cache=True,
            )
        texts = out[:, ids.shape[1] :].tolist()
        return BatchRound(sum(map(len, texts)), time.perf_counter() - begin, texts=texts)

    return answer


def ours(config: EngineConfig, new_tokens: int) -> Callable[[Prompts], BatchRound]:
    engine = BatchEngine(config, make_runner(config))

    def answer(prompts: Prompts) -> BatchRound:
        made = engine.generate(prompts, greedy(new_tokens))
        return BatchRound(
            made.output_tokens,
            made.seconds,
            texts=made.tokens,
            tokens_per_step=made.accept_length,
            step_ms=1e3 * made.mean_decode_latency,
        )

    return answer


def settings(args: argparse.Namespace, **speculation: str | int) -> EngineConfig:
    config = EngineConfig(
        model_path=args.model_path,
        device="cpu",
        dtype="float32",
        cpu_threads=args.threads,
        **speculation,  # type: ignore[arg-type]
    )
    tokens = max(args.input_len, REPEATING_LEN) + args.output_len
    return sized_for(resolve(config), max(args.batch_size), tokens)


def contestants(args: argparse.Namespace) -> list[Contestant[Player, BatchRound]]:
    plain = settings(args, speculative_algorithm="NONE")
    drafter = args.speculative_draft_model_path
    modes = {}  # of ours: the mode to compare with, and what answers
    for weights in args.quantization:
        kind = "" if weights == "auto" else f"-{weights}"
        own = {"quantization": weights, "speculative_draft_model_path": drafter}
        config = settings(args, **own, speculative_algorithm="NONE")
        modes[f"plain{kind}"] = (f"plain{kind}", ours(config, args.output_len))
        config = settings(args, **own, speculative_algorithm="auto")
        if config.speculative_algorithm != "NONE":  # there is a head
            modes[f"eagle{kind}"] = (f"plain{kind}", ours(config, args.output_len))
            tree = settings(args, **own, speculative_algorithm="auto", **TREE)
            modes[f"tree{kind}"] = (f"plain{kind}", ours(tree, args.output_len))
    runs = {PEER: (next(iter(modes)), peer(plain.model_path, args.output_len)), **modes}
    repeating = {}
    if args.ngram:
        ngram = ours(settings(args, speculative_algorithm="NGRAM"), args.output_len)
        plainly = ours(plain, args.output_len)
        repeating = {"plain-repeating": ("plain-repeating", plainly)}
        repeating["ngram-repeating"] = ("plain-repeating", ngram)
    # Loading sets the number of threads; from here on it is the same for all.
    torch.set_num_threads(args.threads)
    vocab_size = read_model_config(plain.model_path).vocab_size
    found: list[Contestant[Player, BatchRound]] = []
    most = max(args.batch_size)
    prompts = synthetic_prompts(plain, vocab_size, most, args.input_len)
    again = repeating_prompts(plain, most) if args.ngram else []
    for batch in args.batch_size:
        for given, players in ((prompts, runs), (again, repeating)):
            for mode, (plain_mode, run) in players.items():
                player = Player(mode, plain_mode, batch, given, run)
                found.append(Contestant(f"{mode}-b{batch}", player))
    return found


def repeating_prompts(config: EngineConfig, batch_size: int) -> Prompts:
    """A problem with its answer, then the same one again, cut at the front. What the model writes
    next it has just read."""
    tokenizer = load_tokenizer(config)
    problems = sorted(gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS), key=lambda p: -len(p.answer))
    prompts = []
    for problem in itertools.islice(itertools.cycle(problems), batch_size):
        asked = f"Question: {problem.question}\nAnswer:"
        text = f"{asked} {problem.answer}\n\n{asked}"
        prompts.append(tokenizer.encode(text, add_special_tokens=False).ids[-REPEATING_LEN:])
    return prompts


def report(
    field: list[Contestant[Player, BatchRound]], about: dict[str, Any]
) -> list[results.Line]:
    """Prints a row for each contestant; returns the result lines."""
    byname = {(each.player.mode, each.player.batch): each for each in field}
    print(
        f"{'mode':>16} {'batch':>5} {'token/s':>9} {'/peer':>6} {'/plain':>6} {'step ms':>8} "
        f"{'accept':>6} {'equal':>7}"
    )
    lines = []
    for each in field:
        player, last = each.player, each.rounds[-1]
        batch = player.batch
        line: results.Line = {"name": each.name, "mode": player.mode, "batch": batch}
        line |= {"value": round(each.fastest, 2), "unit": "token/s"}
        base = byname[PEER, batch]
        if player.prompts == base.player.prompts:
            line["ratio_to_transformers"] = round(each.fastest / base.fastest, 3)
            pairs = zip(last.texts, base.rounds[-1].texts, strict=True)
            line["equal_to_transformers"] = sum(own == other for own, other in pairs)
        line["ratio_to_plain"] = round(each.fastest / byname[player.plain, batch].fastest, 3)
        line["accept_length"] = round(last.tokens_per_step, 3)
        if last.step_ms is not None:
            line["mean_step_ms"] = round(min(r.step_ms or 0.0 for r in each.rounds), 3)
        lines.append({**line, **about})
        print(
            f"{player.mode:>16} {batch:>5} {each.fastest:>9.1f} "
            f"{line.get('ratio_to_transformers', ''):>6} {line['ratio_to_plain']:>6} "
            f"{line.get('mean_step_ms', ''):>8} {last.tokens_per_step:>6.2f} "
            f"{line.get('equal_to_transformers', ''):>7}"
        )
    return lines


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", default="", help="checkpoint; empty: the embedded model")
    parser.add_argument("--speculative-draft-model-path", default="", help="its draft head")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quantization", nargs="+", default=["auto"], help="of ours, each")
    parser.add_argument("--ngram", action="store_true", help="the n-gram drafter, too")
    parser.add_argument("--max-seconds", type=float, help="begin no repetition that ends later")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--result-filename", default=str(RESULTS), help="empty: keep nothing")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    field = contestants(args)
    for contestant in field:
        contestant.player.play()  # warm-up
    play_rounds(field, Player.play, args.repetitions, args.max_seconds)
    about = {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "repetitions": len(field[0].rounds),
        "cpu": facts.cpu_model(),
        "cpu_features": cpu_features(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": facts.commit(),
        "date": facts.today(),
    }
    print(
        f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, "
        f"transformers {about['transformers']}, commit {about['commit']}\n"
        f"{args.input_len} prompt tokens, {args.output_len} new tokens, best of "
        f"{about['repetitions']}; accept: tokens per step; equal: requests with the peer's tokens"
    )
    lines = report(field, about)
    if args.result_filename:
        results.append(args.result_filename, lines)


if __name__ == "__main__":
    main()
