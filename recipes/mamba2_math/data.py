"""Training sequences: problems and chats, tokenized and packed by worker processes.

A document is a chat, or one problem, or several joined by blank lines as a few-shot prompt is. It
ends with ``</s>``. A sequence begins at the start of a document, is filled with whole documents and
cuts the last one: so every sequence shows the model at position 0 what a request begins with.

Block ``i`` of the stream depends on the seed and ``i`` only, not on the number of workers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from mamba2_math import skills
from mamba2_math.problems import MAX_PROBLEMS, SINGLE_SHARE, stream
from mamba2_math.skills.chat import READ, WRITTEN, Chat, pieces
from mamba2_math.tokenizer import EOS_ID, read_records

CHAT_SHARE = 0.59  # of the documents; they are shorter than problems, so about 40 % of the tokens
EXTRA_SHARE = 0.025  # of the problems; they are longer, so about 5 % of the tokens
SEQUENCES_PER_BLOCK = 128

TRAIN_STREAM, VALIDATION_STREAM = 1, 2


class Sequences(NamedTuple):
    """tokens uint16 and kinds uint8, both [count, length].

    ``kinds[i, t]`` is WRITTEN when token t belongs to an answer or is the ``</s>`` after one, else
    READ or SKIPPED (see ``skills.chat``).
    """

    tokens: np.ndarray
    kinds: np.ndarray


class Encoded(NamedTuple):
    """One problem: ``Question: …\\nAnswer:`` and what follows the colon."""

    prompt: list[int]
    answer: list[int]


class ProblemEncoder:
    """Tokenizes problems in pieces that join to the tokens of the whole text."""

    def __init__(self, tokenizer_folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(tokenizer_folder) / "tokenizer.json"))
        newline = self._tokenizer.encode("\n").ids
        self.blank_line = newline * 2  # before a letter, each newline is a piece of its own

    def encode(self, problems: list[tuple[str, str]]) -> list[Encoded]:
        texts = [f"Question: {q}\nAnswer:" for q, _ in problems] + [f" {a}" for _, a in problems]
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        return [Encoded(*pair) for pair in zip(ids[: len(problems)], ids[len(problems) :])]

    def encode_chats(self, chats: list[Chat]) -> list[tuple[list[int], list[int]]]:
        """Tokens and kinds of each, with the end."""
        parts = [list(pieces(chat)) for chat in chats]
        texts = ["".join(piece.text for piece in each) for each in parts]
        encoded = []
        for each, encoding in zip(parts, self._tokenizer.encode_batch(texts)):
            kinds = [piece.kind for piece in each for _ in piece.text]
            marks = [kinds[end - 1] for _, end in encoding.offsets]
            encoded.append(([*encoding.ids, EOS_ID], [*marks, WRITTEN]))
        return encoded

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _problems(seed: int, extra: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    for problem in stream(seed):
        if extra and rng.random() < EXTRA_SHARE:
            record = rng.choice(extra)
            yield record["question"], record["answer"]
        else:
            yield problem.question, problem.answer


def _documents(
    encoder: ProblemEncoder, seed: int, extra: list[dict[str, str]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and kinds of one document after the other."""
    rng = random.Random(seed + 1)
    source, chats = _problems(seed, extra), skills.stream(seed)
    ready: list[Encoded] = []
    ready_chats: list[tuple[list[int], list[int]]] = []
    while True:
        if rng.random() < CHAT_SHARE:
            ready_chats = ready_chats or encoder.encode_chats(list(itertools.islice(chats, 128)))
            yield ready_chats.pop()
            continue
        count = 1 if rng.random() < SINGLE_SHARE else rng.randint(2, MAX_PROBLEMS)
        if len(ready) < count:
            ready += encoder.encode([next(source) for _ in range(256)])
        tokens: list[int] = []
        marks: list[int] = []
        for encoded in [ready.pop() for _ in range(count)]:
            if tokens:
                tokens += encoder.blank_line
                # the newline decides between stopping and the next problem, as </s> does
                marks += [READ] * len(encoder.blank_line)
            tokens += encoded.prompt
            tokens += encoded.answer
            marks += [READ] * len(encoded.prompt)
            marks += [WRITTEN] * len(encoded.answer)
        yield [*tokens, EOS_ID], [*marks, WRITTEN]


def make_block(
    encoder: ProblemEncoder,
    seed: int,
    index: int,
    length: int,
    count: int = SEQUENCES_PER_BLOCK,
    extra: list[dict[str, str]] | None = None,
    split: int = TRAIN_STREAM,
) -> Sequences:
    """Block ``index`` of the endless stream that ``seed`` names."""
    block_seed = random.Random(f"{split}/{seed}/{index}").getrandbits(62)
    documents = _documents(encoder, block_seed, extra or [])
    tokens = np.zeros((count, length), dtype=np.uint16)
    marks = np.zeros((count, length), dtype=np.uint8)
    for i in range(count):
        filled = 0
        while filled < length:
            ids, kinds = next(documents)
            n = min(len(ids), length - filled)
            tokens[i, filled : filled + n] = ids[:n]
            marks[i, filled : filled + n] = kinds[:n]
            filled += n
    return Sequences(tokens, marks)


def _work(
    output: multiprocessing.Queue,
    worker: int,
    workers: int,
    tokenizer_folder: Path,
    seed: int,
    length: int,
    per_block: int,
    extra_path: Path | None,
) -> None:
    # A handler inherited from the parent would keep terminate() from ending this process, and
    # Ctrl-C reaches it too: ending is the parent's decision alone.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    encoder = ProblemEncoder(tokenizer_folder)
    extra = read_records(extra_path) if extra_path else []
    for index in itertools.count(worker, workers):
        if os.getppid() != parent:
            os._exit(1)  # orphaned; a normal exit would wait for a reader of the queue
        block = make_block(encoder, seed, index, length, per_block, extra)
        while os.getppid() == parent and not _put(output, block):
            pass


def _put(output: multiprocessing.Queue, block: Sequences) -> bool:
    try:
        output.put(block, timeout=5)
    except queue.Full:
        return False
    return True


class SequenceStream:
    """Batches for training, made ahead by worker processes. Create it before using a GPU: the
    workers are forked."""

    def __init__(
        self,
        tokenizer_folder: Path,
        seed: int,
        length: int,
        workers: int,
        per_block: int = SEQUENCES_PER_BLOCK,
        extra_path: Path | None = None,
        blocks_ahead: int = 1024,
    ) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context = multiprocessing.get_context("fork")
        self._queues = [context.Queue(max(2, blocks_ahead // workers)) for _ in range(workers)]
        self._processes = [
            context.Process(
                target=_work,
                args=(q, i, workers, tokenizer_folder, seed, length, per_block, extra_path),
                daemon=True,
            )
            for i, q in enumerate(self._queues)
        ]
        for process in self._processes:
            process.start()
        self._next = 0
        self._rest: Sequences | None = None
        self.waited = 0  # how often a block was not ready: the workers are too slow

    def _block(self) -> Sequences:
        worker = self._next % len(self._queues)
        self._next += 1
        try:
            return self._queues[worker].get_nowait()
        except queue.Empty:
            self.waited += 1
        while True:
            try:
                return self._queues[worker].get(timeout=5)
            except queue.Empty:
                if not self._processes[worker].is_alive():
                    raise RuntimeError(
                        f"data worker {worker} ended with exit code "
                        f"{self._processes[worker].exitcode}; its traceback is above"
                    ) from None

    def batch(self, count: int) -> Sequences:
        """The next ``count`` sequences of the stream."""
        parts = [self._rest] if self._rest is not None else []
        while sum(len(part.tokens) for part in parts) < count:
            parts.append(self._block())
        joined = Sequences(*(np.concatenate(arrays) for arrays in zip(*parts)))
        self._rest = Sequences(*(array[count:] for array in joined))
        return Sequences(*(array[:count] for array in joined))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for q in self._queues:
            q.cancel_join_thread()
            q.close()
