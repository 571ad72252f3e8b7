"""Few-shot GSM8K accuracy of a running server; flags and output lines are those of SGLang's script.

    python -m mamba_eagle.eval.few_shot_gsm8k --num-questions 200

Without --data-path it asks the 200 held-out problems that come with the embedded model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.bench import client, results
from mamba_eagle.config import Parser
from mamba_eagle.eval import gsm8k


class Reply(NamedTuple):
    text: str
    completion_tokens: int
    verify_steps: int  # 0 without speculation

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Reply:
        """reply: of /generate."""
        meta = reply["meta_info"]
        return cls(reply["text"], meta["completion_tokens"], meta.get("spec_verify_ct") or 0)


class Score(NamedTuple):
    """Shares of all questions, seconds, tokens per second, tokens per verify step (0: none)."""

    accuracy: float
    invalid: float
    latency: float
    output_throughput: float
    accept_length: float

    def lines(self) -> list[str]:
        """What is printed; other tools parse the first four."""
        text = [
            f"Accuracy: {self.accuracy:.3f}",
            f"Invalid: {self.invalid:.3f}",
            f"Latency: {self.latency:.3f} s",
            f"Output throughput: {self.output_throughput:.3f} token/s",
        ]
        if self.accept_length:
            text.append(f"Acceptance length: {self.accept_length:.3f} token/step")
        return text


class Outcome(NamedTuple):
    replies: list[Reply]  # in the order of the questions
    score: Score


class Progress:
    """Says on standard error how far the questions are, ten times on the way."""

    def __init__(self, questions: list[gsm8k.Example]) -> None:
        self.questions, self.done, self.right = questions, 0, 0

    def take(self, index: int, reply: dict[str, Any]) -> None:
        label = gsm8k.answer_value(self.questions[index].answer)
        self.right += gsm8k.answer_value(reply["text"]) == label
        self.done += 1
        every = max(1, len(self.questions) // 10)
        if self.done % every == 0:
            print(
                f"{self.done} of {len(self.questions)} answered, {self.right} right",
                file=sys.stderr,
                flush=True,
            )


def score(questions: list[gsm8k.Example], replies: list[Reply], latency: float) -> Score:
    """``latency``: seconds from the first request to the last reply."""
    labels = [gsm8k.answer_value(question.answer) for question in questions]
    values = [gsm8k.answer_value(reply.text) for reply in replies]
    right = sum(value is not None and value == label for value, label in zip(values, labels))
    tokens = sum(reply.completion_tokens for reply in replies)
    steps = sum(reply.verify_steps for reply in replies)
    return Score(
        accuracy=right / len(questions),
        invalid=values.count(None) / len(questions),
        latency=latency,
        output_throughput=tokens / latency,
        accept_length=tokens / steps if steps else 0.0,
    )


def save_texts(path: str | Path, questions: list[gsm8k.Example], replies: list[Reply]) -> None:
    """One JSON object per line, so that two runs can be compared with ``diff``."""
    lines = [
        {
            "question": question.question,
            "text": reply.text,
            "value": gsm8k.answer_value(reply.text),
            "label": gsm8k.answer_value(question.answer),
        }
        for question, reply in zip(questions, replies)
    ]
    results.write(path, lines)


def measure(
    base_url: str,
    task: gsm8k.Task,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    parallel: int = 128,
    api_key: str = "",
    on_reply: client.OnReply = client.no_one,
) -> Outcome:
    """Ask every question of ``task``, at most ``parallel`` at a time, and score the answers.

    Raises: ServerError at the first request that fails.
    """
    prompts = [gsm8k.make_prompt(task.shots, problem.question) for problem in task.questions]
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "stop": gsm8k.STOP}
    bodies = [{"text": prompt, "sampling_params": sampling} for prompt in prompts]
    begin = time.perf_counter()
    made = client.generate_all(base_url, bodies, parallel, api_key, on_reply=on_reply)
    seconds = time.perf_counter() - begin
    replies = [Reply.of(reply) for reply in made]
    return Outcome(replies, score(task.questions, replies, seconds))


def count(text: str) -> int:
    """An argument that must be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
    return value


def make_parser() -> Parser:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-shots", type=int, default=5, help="solved examples in each prompt")
    parser.add_argument(
        "--data-path",
        default=str(gsm8k.EMBEDDED_PROBLEMS),
        help="GSM8K's jsonl; default: the problems held out from the embedded model",
    )
    parser.add_argument("--num-questions", type=count, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--parallel", type=count, default=128, help="requests at the same time")
    client.add_server_flags(parser, "http://127.0.0.1:30000")
    parser.add_argument("--host", default="", help="SGLang's flags, in place of --url")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--save-texts", default="", metavar="FILE", help="write every text to FILE")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    asked_at_port = args.host or args.port != 30000
    url = f"{args.host or '127.0.0.1'}:{args.port}" if asked_at_port else args.url
    try:
        task = gsm8k.load_task(args.data_path, args.num_shots, args.num_questions)
        outcome = measure(
            client.full_url(url),
            task,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            parallel=args.parallel,
            api_key=args.api_key,
            on_reply=Progress(task.questions).take,
        )
        print("\n".join(outcome.score.lines()))  # also if the texts cannot be saved
        if args.save_texts:
            save_texts(args.save_texts, task.questions, outcome.replies)
    except (client.ServerError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
