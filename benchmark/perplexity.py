"""Perplexity of a text by how weights are kept, on this machine.

    python -m benchmark.perplexity --data-path test.jsonl --quantization auto int8 int4

--data-path: problems in GSM8K's form, one JSON object per line; question and answer are read as one
text each, and every token after the first counts. Prints a row for each --quantization and appends
lines to benchmark/results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from mamba_eagle.bench import facts, results
from mamba_eagle.bench.batch import sized_for
from mamba_eagle.config import EngineConfig
from mamba_eagle.eval.gsm8k import Example, read_examples
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.models.base import CausalLM
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.leader import make_runner
from mamba_eagle.runner.model_runner import ModelRunner

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"


@torch.inference_mode()
def perplexity(model: CausalLM, texts: list[list[int]]) -> float:
    total, count = 0.0, 0
    for ids in texts:
        context = FullSequenceContext(1, len(ids) - 1)
        logits = model.compute_logits(model(torch.tensor(ids[:-1]), context))
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
        total, count = total - float(chosen.double().sum()), count + len(ids) - 1
    return math.exp(total / count)


def tokenized(tokenizer_path: str, examples: list[Example]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_path) / "tokenizer.json"))
    return [tokenizer.encode(f"{e.question}\n{e.answer}").ids for e in examples]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--model-path", default="", help="checkpoint; empty: the embedded model")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--quantization", nargs="+", default=["auto", "int8", "int4"])
    parser.add_argument("--result-filename", default=str(RESULTS), help="empty: keep nothing")
    args = parser.parse_args()
    lines = []
    for mode in args.quantization:
        config = EngineConfig(
            model_path=args.model_path,
            quantization=mode,
            speculative_algorithm="NONE",
            log_level="error",
        )
        config = sized_for(resolve(config), 1, 64)
        runner = make_runner(config)
        assert isinstance(runner, ModelRunner)
        texts = tokenized(config.tokenizer_path, read_examples(args.data_path)[: args.texts])
        value = perplexity(runner.model, texts)
        print(f"{mode:>6} {value:9.4f}")
        lines.append(
            {
                "name": f"perplexity-{mode}",
                "mode": mode,
                "value": round(value, 4),
                "unit": "perplexity",
                "model": Path(config.model_path).name,
                "texts": len(texts),
                "tokens": sum(len(ids) - 1 for ids in texts),
                "weight_mb": round(weight_bytes(runner.model) / 1e6, 2),
                "cpu": facts.cpu_model(),
                "torch": torch.__version__,
                "commit": facts.commit(),
                "date": facts.today(),
            }
        )
    if args.result_filename:
        results.append(args.result_filename, lines)


if __name__ == "__main__":
    main()
