"""Prompts for measurements, made of the problems that come with the embedded model."""

import itertools
import random
from pathlib import Path

from tokenizers import Tokenizer

from mamba_eagle.config import EngineConfig, ModelSettings
from mamba_eagle.constrain.vocabulary import read_tokenizer
from mamba_eagle.eval import gsm8k
from mamba_eagle.hub import is_gguf


def load_tokenizer(config: ModelSettings) -> Tokenizer:
    """Of a resolved ``config``."""
    return Tokenizer.from_str(read_tokenizer(config.tokenizer_path))


def problem_texts(count: int) -> list[str]:
    """The first ``count`` problems as prompts, without solved examples."""
    task = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, count)
    return [gsm8k.make_prompt([], problem.question) for problem in task.questions]


def synthetic_prompts(
    config: EngineConfig, vocab_size: int, batch_size: int, length: int
) -> list[list[int]]:
    """``batch_size`` prompts of ``length`` token ids; random ids with dummy weights.

    Where there is a tokenizer: solved problems, then one that asks for a long answer, cut at the
    front. What the model writes next is an answer, the kind of text that drafters are trained for.
    """
    path = config.tokenizer_path
    has_tokenizer = is_gguf(path) or Path(path, "tokenizer.json").is_file()
    if config.load_format == "dummy" or not has_tokenizer:
        rng = random.Random(0)
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch_size)]
    tokenizer = load_tokenizer(config)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    problems = gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS)
    asked = sorted(problems, key=lambda problem: -len(problem.answer))
    prompts = []
    for i in range(batch_size):
        ids = encode(f"Question: {asked[i % len(asked)].question}\nAnswer:")
        for k in itertools.count(i * 7):  # prompts of a batch do not begin alike
            if len(ids) >= length:
                break
            problem = problems[k % len(problems)]
            ids = encode(f"Question: {problem.question}\nAnswer: {problem.answer}\n\n") + ids
        prompts.append(ids[len(ids) - length :])
    return prompts
