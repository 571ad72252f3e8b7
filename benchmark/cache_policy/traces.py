"""Generated requests, in the order in which they come: what was asked, and what was answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

VOCABULARY = 30_000


class Turn(NamedTuple):
    prompt: list[int]
    output: list[int]


Session = Iterator[Turn]


class Writer:
    """Random tokens and lengths."""

    def __init__(self, luck: random.Random) -> None:
        self.luck = luck

    def text(self, low: int, high: int) -> list[int]:
        return [self.luck.randrange(VOCABULARY) for _ in range(self.luck.randint(low, high))]

    def texts(self, count: int, low: int, high: int) -> list[list[int]]:
        return [self.text(low, high) for _ in range(count)]

    def popular(self, texts: list[list[int]]) -> list[int]:
        """The k-th with a weight of 1 / k (Zipf)."""
        return self.luck.choices(texts, [1 / k for k in range(1, len(texts) + 1)])[0]


def chats(write: Writer) -> Iterator[Session]:
    """One of 8 system prompts; about 6 turns, each after the whole history."""
    systems = write.texts(8, 200, 1_500)

    def session() -> Session:
        history = list(write.popular(systems))
        while True:
            history += write.text(10, 200)
            output = write.text(30, 400)
            yield Turn(list(history), output)
            history += output
            if write.luck.random() < 1 / 6:
                return

    while True:
        yield session()


def agents(write: Writer) -> Iterator[Session]:
    """One of 3 long prompts with tools; 5 to 25 steps, each with what a tool returned; one step in
    eight goes back up to 3 steps and takes another way."""
    systems = write.texts(3, 2_000, 4_000)

    def session() -> Session:
        histories = [write.popular(systems) + write.text(50, 300)]
        for _ in range(write.luck.randint(5, 25)):
            if write.luck.random() < 1 / 8:
                del histories[max(1, len(histories) - write.luck.randint(1, 3)) :]
            output = write.text(20, 150)
            yield Turn(list(histories[-1]), output)
            histories.append(histories[-1] + output + write.text(20, 800))

    while True:
        yield session()


def documents(write: Writer) -> Iterator[Session]:
    """One of 80 documents, at times one of its 4 sections more, and a question."""
    texts = write.texts(80, 800, 5_000)
    sections = {id(text): write.texts(4, 200, 800) for text in texts}

    def session() -> Session:
        document = write.popular(texts)
        prompt = list(document)
        if write.luck.random() < 0.5:
            prompt += write.luck.choice(sections[id(document)])
        yield Turn(prompt + write.text(10, 60), write.text(20, 200))

    while True:
        yield session()


def few_shot(write: Writer) -> Iterator[Session]:
    """One of 40 tasks with its examples, and a question of its own."""
    tasks = write.texts(40, 400, 2_500)

    def session() -> Session:
        yield Turn(write.popular(tasks) + write.text(30, 150), write.text(20, 100))

    while True:
        yield session()


def mixed(write: Writer) -> Iterator[Session]:
    """All of them."""
    kinds = [kind(write) for kind in (chats, agents, documents, few_shot)]
    while True:
        yield next(write.luck.choice(kinds))


TRACES: dict[str, Callable[[Writer], Iterator[Session]]] = {
    each.__name__: each for each in (chats, agents, documents, few_shot, mixed)
}


def trace(name: str, requests: int, at_once: int, seed: int) -> list[Turn]:
    """``requests`` turns, of ``at_once`` sessions that alternate at random."""
    write = Writer(random.Random(f"{name} {seed}"))
    new = TRACES[name](write)
    live = [next(new) for _ in range(at_once)]
    turns: list[Turn] = []
    while len(turns) < requests:
        place = write.luck.randrange(at_once)
        turn = next(live[place], None)
        if turn is None:
            live[place] = next(new)
        else:
            turns.append(turn)
    return turns
