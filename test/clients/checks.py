"""What the clients' scripts share. It runs in each client's environment: standard library only.

A script names its checks with ``@check`` and ends with ``run()``, which prints a line for each.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

BASE_URL = os.environ["MAMBA_EAGLE_URL"]  # without /v1
MODEL = os.environ["MAMBA_EAGLE_MODEL"]
TOKENIZER = os.environ["MAMBA_EAGLE_TOKENIZER"]  # a folder
ASSETS = Path(TOKENIZER).parent
V1 = f"{BASE_URL}/v1"
KEY = "not-needed"
QUESTION = (
    "Mia had 12 apples. She bought 3 bags with 5 apples each and gave 7 apples to her brother. "
    "How many apples does she have now?"
)
PROMPT = f"Question: {QUESTION}\nAnswer:"
RESULT = "20"  # the embedded model's, worked out in several lines
# The server's switch for templates that can reason; the answer's lines are then the reasoning.
THINKING = {"enable_thinking": True}
INTEGER = {"type": "integer", "minimum": 0, "maximum": 999}
PARAMETERS = {
    "type": "object",
    "properties": {"left": INTEGER, "right": INTEGER},
    "required": ["left", "right"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


class Check(NamedTuple):
    what: str
    function: Callable[[], Any]


CHECKS: list[Check] = []


def check(what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """``what`` is run by the function, which may be asynchronous; it raises if it fails."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS.append(Check(what, function))
        return function

    return add


def run(package: str) -> None:
    """Runs all checks and exits with 1 if one has failed. package: the client's."""
    failed = 0
    for what, function in CHECKS:
        begin = time.perf_counter()
        problem = _problem(function)
        failed += bool(problem)
        line = {"client": package, "version": version(package), "what": what, "problem": problem}
        print(f"{package} {version(package)}: {what}: {problem or 'ok'}", end=" ")
        print(f"({time.perf_counter() - begin:.1f} s)", flush=True)
        if path := os.environ.get("MAMBA_EAGLE_CLIENT_RESULTS"):
            with open(path, "a") as results:
                results.write(json.dumps(line) + "\n")
    sys.exit(1 if failed else 0)


def _problem(function: Callable[[], Any]) -> str:
    try:
        value = function()
        if inspect.iscoroutine(value):
            asyncio.run(value)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return ""


def post(path: str, body: dict[str, Any], **headers: str) -> bytes:
    """The bytes of a reply, as no client has touched them."""
    request = urllib.request.Request(
        BASE_URL + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        content: bytes = reply.read()
    return content


def equal(a: Any, b: Any) -> None:
    assert a == b, f"{a!r} is not {b!r}"


def adds(arguments: Any) -> None:
    """They fit PARAMETERS. arguments: JSON text, or an object."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    equal(sorted(values), ["left", "right"])
    assert all(type(v) is int and 0 <= v <= 999 for v in values.values()), values
