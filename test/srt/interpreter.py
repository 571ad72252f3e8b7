"""Tests that run in Triton's interpreter, which must be asked for before triton is imported: so
each file that has some is run once more, in a process of its own.

These processes run one after the other beside all other tests, which keep one core busy. The file's
``test_in_the_interpreter``, which is called when the other tests have ended, waits for its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

NAME = "test_in_the_interpreter"
SERVERS = ("chaos", "e2e")  # folders whose tests need all cores


class Ended(NamedTuple):
    code: int
    output: str


class Interpreter:
    """The processes of a session."""

    def __init__(self) -> None:
        self._waiting: list[pytest.Item] = []
        self._runs: dict[Path, Future[Ended]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def expect(self, items: list[pytest.Item]) -> None:
        """All tests that were collected. Those that will ask for a process are put last."""
        items.sort(key=lambda item: item.name == NAME)
        self._waiting = [item for item in items if item.name == NAME and not is_skipped(item)]

    def start(self) -> None:
        """Once other tests leave a core free; again does nothing."""
        for item in self._waiting:
            self._runs[item.path] = self._pool.submit(self._run, files_of(item))
        self._waiting = []

    def outcome(self, item: pytest.Item) -> Ended:
        """Waits for the process of the item's file."""
        self.start()
        return self._runs[item.path].result()

    def close(self) -> None:
        """Ends what still runs when a session is given up."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()

    def _run(self, files: list[Path]) -> Ended:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        self._process = subprocess.Popen(
            [*command, *map(str, files)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if self._closed:
            self._process.kill()
        output = self._process.communicate()[0]
        return Ended(self._process.returncode, output)


def is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def files_of(item: pytest.Item) -> list[Path]:
    """The test's own file and the neighbours that it runs along."""
    assert isinstance(item, pytest.Function)
    names = getattr(item.function, "neighbours", ())
    return [item.path, *(item.path.with_name(name) for name in names)]


def check(item: pytest.Item) -> None:
    """What a file's ``test_in_the_interpreter`` does."""
    ended = item.config.stash[KEY].outcome(item)
    assert ended.code == 0, ended.output


KEY = pytest.StashKey[Interpreter]()
