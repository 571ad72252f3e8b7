"""GSM8K and problems in its form: reading them, few-shot prompts, answers. No torch, no HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mamba_eagle.config import ASSETS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EMBEDDED_PROBLEMS = ASSETS / "gsm8k_style_test.jsonl"
EMBEDDED_SHOTS = ASSETS / "gsm8k_style_shots.jsonl"
STOP = ["Question", "Assistant:", "<|separator|>"]


class Example(NamedTuple):
    question: str
    answer: str  # worked steps; the last integer is the result


class Task(NamedTuple):
    """What is asked: solved examples to show first, and the questions."""

    shots: list[Example]
    questions: list[Example]


def read_examples(path: str | Path) -> list[Example]:
    """One JSON object per line, with ``question`` and ``answer``.

    Raises: ValueError naming the first line that is not one.
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
    """Shots and questions, none of which is both.

    The embedded problems have shots in a file of their own; elsewhere the first ``num_shots`` lines
    are the shots and the questions follow. Fewer questions than wanted are fine.
    Raises: ValueError if there are too few lines for the shots and one question.
    """
    questions = read_examples(path)
    if Path(path) == EMBEDDED_PROBLEMS and EMBEDDED_SHOTS.is_file():
        shots = read_examples(EMBEDDED_SHOTS)
    else:
        shots = questions[:num_shots]
        questions = questions[num_shots:]
    if num_shots < 0:
        raise ValueError(f"--num-shots {num_shots}: must be 0 or more")
    if len(shots) < num_shots or not questions:
        raise ValueError(
            f"--num-shots {num_shots}: {path} has {len(shots) + len(questions)} problems, "
            "which leaves no question; give a longer --data-path or fewer shots"
        )
    return Task(shots[:num_shots], questions[:num_questions])


def make_prompt(shots: list[Example], question: str) -> str:
    """Solved examples joined by blank lines, then the question: ends with ``Answer:``."""
    solved = [f"Question: {shot.question}\nAnswer: {shot.answer}" for shot in shots]
    return "\n\n".join([*solved, f"Question: {question}\nAnswer:"])


def prompt_ids(problems: list[Example], tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts without examples, as token ids."""
    texts = [make_prompt([], problem.question) for problem in problems]
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def answer_value(text: str) -> int | None:
    """The last integer in ``text`` (commas removed, no sign); None if there is none."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    # A model that repeats itself may write more digits than int() takes: no answer either.
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= 1000 else None
