"""``python -m mamba2_math.skills --count 5`` prints chats; with ``--output`` it writes documents of
problems and chats, in the shares of the training text, for ``train-drafter --skip-generation``."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from mamba2_math import problems, skills
from mamba2_math.data import CHAT_SHARE
from mamba2_math.skills.chat import Chat, pieces


def as_record(chat: Chat) -> problems.Record:
    """Its prompt and the answer at its end."""
    *before, start, answer = "".join(piece.text for piece in pieces(chat)).rpartition("\nAnswer:")
    return {"prompt": "".join([*before, start]), "answer": answer}


def documents(seed: int, count: int) -> Iterator[problems.Record]:
    """Problems, and chats among them; the same for the same seed."""
    rng, chats = random.Random(seed), skills.stream(seed)
    for record in problems.generate_documents(seed, count):
        yield as_record(next(chats)) if rng.random() < CHAT_SHARE else record


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mamba2_math.skills", description="Make chats by rule."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--output", type=Path, help="jsonl file to write; without it, print chats")
    args = parser.parse_args(argv)
    if args.output:
        records = documents(args.seed, args.count)
        args.output.write_text(problems.as_jsonl(records), encoding="utf-8")
        return
    for chat in itertools.islice(skills.stream(args.seed), args.count):
        print("".join(piece.text for piece in pieces(chat)), end="\n\n---\n\n")


if __name__ == "__main__":
    main()
