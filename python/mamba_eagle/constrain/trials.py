"""The process that tries grammars for the server: each in a child of its own, which can be killed.

     server process             this process: the vocabulary         a child: one grammar
     ProcessJudge      Trial ─▶ fork ──────────────────────────────▶ tries it, within its limits
                       Stop ──▶ SIGKILL ───────────────────────────▶
                    ◀── Ended ──────────────────────────────────────  its verdict, or its death

A fork takes a few milliseconds, shares the vocabulary's memory, and gives back all that a grammar
took when it ends, however it ends. This process computes nothing, so it always answers; it ends
when the server process does.
"""

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import Grammar
from mamba_eagle.constrain.vocabulary import NoVocabulary, Vocabulary
from mamba_eagle.limits import MAX_GRAMMAR_MEMORY
from mamba_eagle.message.lifetime import killed_with_parent

# Less than any thread of the runner has (2 MiB where ulimit -s is unlimited): what fits here fits
# there.
STACK = 3 * 2**19
TOO_LARGE = f"it needs more than {MAX_GRAMMAR_MEMORY} MiB of memory: make it simpler"
LENGTH = struct.Struct("!I")


class Verdict(msgspec.Struct, frozen=True):
    """message: why a grammar cannot be served, "" if it can. path: what is to blame within a
    schema. text: what the runner gets, if that takes long to make."""

    message: str = ""
    path: str = ""
    text: str = ""


class Tokens(msgspec.Struct, tag=True):
    """The first message: what a ``Vocabulary`` is made of."""

    tokenizer: str
    size: int
    eos: list[int]


class Trial(msgspec.Struct, tag=True):
    """seconds: of processor time. nice: added to this process's."""

    number: int
    grammar: Grammar
    seconds: float
    nice: int


class Stop(msgspec.Struct, tag=True):
    number: int


class Ended(msgspec.Struct):
    """verdict: None if its time was over."""

    number: int
    verdict: Verdict | None


def framed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def verdict_on(vocabulary: Vocabulary | NoVocabulary, grammar: Grammar) -> Verdict:
    """May take as long as the grammar wants."""
    if isinstance(vocabulary, NoVocabulary):
        return Verdict(f"this server cannot constrain its output: {vocabulary}")
    try:
        message, path = vocabulary.problem(grammar)
    except GrammarError as error:
        return Verdict(str(error), error.path)
    is_slow = not message and any(part.kind == "ebnf" for part in grammar.parts())
    return Verdict(message, path, grammar.text if is_slow else "")


def load(tokens: Tokens) -> Vocabulary | NoVocabulary:
    try:
        return Vocabulary(tokens.tokenizer, tokens.size, tokens.eos)
    except NoVocabulary as error:
        return error


class _Child:
    def __init__(self, pid: int, answer: int) -> None:
        """answer: the end of a pipe to read from."""
        self.pid, self.answer = pid, answer
        self.received = b""

    def verdict(self) -> Verdict | None:
        """When it has ended."""
        os.close(self.answer)
        _, status = os.waitpid(self.pid, 0)
        if self.received:
            return msgspec.msgpack.decode(self.received, type=Verdict)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in (signal.SIGPROF, signal.SIGKILL):
            return None
        if number in (signal.SIGSEGV, signal.SIGBUS):
            return Verdict(
                f"it needs more than {STACK / 2**20:g} MiB of stack: nest it less deeply"
            )
        return Verdict(TOO_LARGE)  # how Rust ends when it gets no memory


class Trials:
    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._received = bytearray()
        self._vocabulary: Vocabulary | NoVocabulary
        self._children: dict[int, _Child] = {}  # by number
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def serve(self) -> None:
        """Returns when the server process has gone."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._hear(key.data)
                elif not self._take_in():
                    for child in self._children.values():
                        os.kill(child.pid, signal.SIGKILL)
                    return

    def _take_in(self) -> bool:
        piece = self._server.recv(2**18)
        self._received += piece
        for message in self._messages():
            if isinstance(message, Trial):
                self._begin(message)
            elif isinstance(message, Tokens):
                self._vocabulary = load(message)
                gc.collect()
                gc.freeze()  # so that children copy nothing of it
            elif message.number in self._children:
                os.kill(self._children[message.number].pid, signal.SIGKILL)
        return bool(piece)

    def _messages(self) -> Iterator[Tokens | Trial | Stop]:
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            body = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            yield msgspec.msgpack.decode(body, type=Tokens | Trial | Stop)

    def _begin(self, trial: Trial) -> None:
        answer, given = os.pipe()
        pid = os.fork()
        if not pid:
            self._try(trial, given)
        os.close(given)
        self._children[trial.number] = _Child(pid, answer)
        self._selector.register(answer, selectors.EVENT_READ, trial.number)

    def _try(self, trial: Trial, answer: int) -> NoReturn:
        """In the child."""
        try:
            killed_with_parent()
            self._server.close()
            _limit(trial)
            try:
                verdict = verdict_on(self._vocabulary, trial.grammar)
            except MemoryError:
                verdict = Verdict(TOO_LARGE)
            with os.fdopen(answer, "wb") as file:
                file.write(msgspec.msgpack.encode(verdict))
        finally:
            os._exit(0)

    def _hear(self, number: int) -> None:
        child = self._children[number]
        piece = os.read(child.answer, 2**16)
        child.received += piece
        if not piece:
            del self._children[number]
            self._selector.unregister(child.answer)
            self._server.sendall(framed(Ended(number, child.verdict())))


def _limit(trial: Trial) -> None:
    """What the kernel ends this process for."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # where Rust says that it gets no memory
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, trial.seconds)
    os.nice(trial.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    with contextlib.suppress(OSError):  # only Linux has the file
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_GRAMMAR_MEMORY * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    killed_with_parent()
    with contextlib.suppress(ConnectionError), socket.socket(fileno=0) as server:
        Trials(server).serve()


if __name__ == "__main__":
    main()
