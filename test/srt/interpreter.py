"""Tests that run in Triton's interpreter, which must be asked for before triton is imported: so
each file that has some is run once more, in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

# Runs the files that each line names, in a fork of itself, and answers with pytest's exit code.
FORKS = """
import json, os, sys
import pytest, torch
import mamba_eagle.backend.triton.backend, mamba_eagle.devices
for line in sys.stdin:
    output, *files = json.loads(line)
    if not (pid := os.fork()):
        written = os.open(output, os.O_WRONLY)
        os.dup2(written, 1), os.dup2(written, 2)
        code = pytest.main(["-q", "-p", "no:cacheprovider", *files])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def forking() -> subprocess.Popen[str]:
    """A process that has loaded what each file needs, which takes longer than many files' tests."""
    return subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def files_of(item: pytest.Item) -> list[str]:
    """The test's own file and the neighbours that it runs along."""
    assert isinstance(item, pytest.Function)
    names = getattr(item.function, "neighbours", ())
    return [str(path) for path in (item.path, *map(item.path.with_name, names))]


def check(item: pytest.Item) -> None:
    """What a file's ``test_in_the_interpreter`` does."""
    process = forking()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output:
        try:
            print(json.dumps([output.name, *files_of(item)]), file=process.stdin, flush=True)
            code = process.stdout.readline()
        except BaseException:  # it takes too long
            forking.cache_clear()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        assert code == "0\n", output.read()


def patch_languages_once() -> None:
    """For a process that interprets: a function that a kernel calls finds triton.language as the
    kernel's launch has left it. Triton would patch all of it again for each call, which takes more
    time than what the function computes."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_once(function: Callable[..., Any]) -> Any:
        found = languages(function)
        if found and all(each.range.__module__ == interpreter.__name__ for each in found):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_once
