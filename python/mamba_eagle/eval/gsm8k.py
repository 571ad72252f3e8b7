"""GSM8K and problems in its form: reading them, few-shot prompts, answers; and prompts for
measurements, made of the problems that come with the embedded model. No torch, no HTTP."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from mamba_eagle.config import EngineConfig, ModelSettings
from mamba_eagle.constrain.vocabulary import read_tokenizer
from mamba_eagle.embedded import ASSETS
from mamba_eagle.hub import is_gguf

EMBEDDED_PROBLEMS = ASSETS / "gsm8k_style_test.jsonl"
STOP = ["Question", "Assistant:", "<|separator|>"]
MAX_DIGITS = 1000  # a model that repeats itself can write more digits than int() accepts


class Example(NamedTuple):
    question: str
    answer: str  # worked steps; the last integer is the result


class Task(NamedTuple):
    """Solved examples for the prompts, and the questions to ask."""

    shots: list[Example]
    questions: list[Example]


def read_examples(path: str | Path) -> list[Example]:
    """Reads one JSON object per line, with ``question`` and ``answer``.

    Raises: ValueError naming the first line without them, or where they are not texts.
    """
    examples = []
    with Path(path).open(encoding="utf-8") as file:  # its lines end where those of JSON do
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                example = Example(record["question"], record["answer"])
                if not all(isinstance(text, str) for text in example):
                    raise TypeError("both are texts")
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: needs a JSON object with question and answer "
                    f"({error!r})"
                ) from None
            examples.append(example)
    return examples


def load_task(path: str | Path, num_shots: int, num_questions: int) -> Task:
    """The first ``num_shots`` examples of a file are the shots, and up to ``num_questions`` of the
    examples after them are the questions.

    Raises: ValueError if ``num_shots`` is negative or leaves no question.
    """
    if num_shots < 0:
        raise ValueError(f"--num-shots {num_shots}: must be 0 or more")
    examples = read_examples(path)
    shots, questions = examples[:num_shots], examples[num_shots:]
    if not questions:
        raise ValueError(
            f"--num-shots {num_shots}: {path} has {len(examples)} problems, "
            "which leaves no question; give a longer --data-path or fewer shots"
        )
    return Task(shots, questions[:num_questions])


def make_prompt(shots: list[Example], question: str) -> str:
    """Solved examples joined by blank lines, then the question: ends with ``Answer:``."""
    solved = [f"Question: {shot.question}\nAnswer: {shot.answer}" for shot in shots]
    return "\n\n".join([*solved, f"Question: {question}\nAnswer:"])


def answer_value(text: str) -> int | None:
    """The last integer in ``text``, without sign and thousands separators; None if there is none or
    if it has more than MAX_DIGITS digits."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= MAX_DIGITS else None


def load_tokenizer(config: ModelSettings) -> Tokenizer:
    """The tokenizer of a resolved ``config``."""
    return Tokenizer.from_str(read_tokenizer(config.tokenizer_path))


def problem_texts(count: int) -> list[str]:
    """The first ``count`` problems as prompts, without solved examples."""
    task = load_task(EMBEDDED_PROBLEMS, 0, count)
    return [make_prompt([], problem.question) for problem in task.questions]


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
        return tokenizer.encode(text, add_special_tokens=False).ids

    problems = read_examples(EMBEDDED_PROBLEMS)
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
