"""Tests that run in Triton's interpreter, which must be asked for before triton is imported: so
each file that has some is run once more, in a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def files_of(item: pytest.Item) -> list[Path]:
    """The test's own file and the neighbours that it runs along."""
    assert isinstance(item, pytest.Function)
    names = getattr(item.function, "neighbours", ())
    return [item.path, *(item.path.with_name(name) for name in names)]


def check(item: pytest.Item) -> None:
    """What a file's ``test_in_the_interpreter`` does."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files_of(item)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout


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
