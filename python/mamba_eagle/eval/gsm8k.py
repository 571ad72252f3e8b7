"""GSM8K and problems in its form: reading them, few-shot prompts, answers. No torch, no HTTP."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from mamba_eagle.embedded import ASSETS

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

    Raises: ValueError naming the first line without them.
    """
    examples = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            examples.append(Example(record["question"], record["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: needs a JSON object with question and answer ({error!r})"
            ) from None
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
