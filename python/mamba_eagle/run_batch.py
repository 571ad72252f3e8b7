"""``mamba-eagle run-batch IN.jsonl OUT.jsonl``: answers a file of requests, without a server.

Lines are those of OpenAI's batches:

    {"custom_id": "7", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1 + 1 ="}}

Each gets a line in OUT with its custom_id, in the order in which they are done. Lines that OUT has
already are skipped, so that a run which was ended goes on where it was. A line that is wrong gets
an error of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from mamba_eagle.config import ConfigError, Parser, ServerConfig, add_arguments, from_arguments
from mamba_eagle.core import shown
from mamba_eagle.engine import Engine, EngineError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate")


class Line(NamedTuple):
    """A request of the file; ``problem`` says why it cannot be one."""

    custom_id: str
    url: str
    body: dict[str, Any]
    problem: str = ""


def make_parser() -> Parser:
    parser = Parser(
        usage="%(prog)s [-h] IN OUT [options]", description="Answer a file of requests."
    )
    parser.add_argument("input", metavar="IN", help="requests in JSON, one per line")
    parser.add_argument("output", metavar="OUT", help="replies are added to this file")
    add_arguments(parser, ServerConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every line was answered, 1 if some got errors, 2 if nothing could run."""
    arguments = make_parser().parse_args(argv)
    config: ServerConfig = from_arguments(ServerConfig, arguments)
    try:
        lines = list(read_lines(arguments.input))
        done = read_done(arguments.output)
        with open(arguments.output, "a", encoding="utf-8") as output:
            settings = {**vars(config), "log_level": "warning"}
            with Engine(**settings) as engine:
                failed = asyncio.run(run(engine, lines, done, output))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (ConfigError, EngineError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(lines)} requests, {len(done)} of them done before, {failed} with errors")
    return 1 if failed else 0


# ── the files ────────────────────────────────────────────────────────────────────────────────


def read_lines(path: str) -> Iterator[Line]:
    """Raises: OSError"""
    seen: set[str] = set()
    for number, text in enumerate(Path(path).read_bytes().splitlines(), 1):
        if text.strip():
            line = _parse(text, number)
            if line.custom_id in seen:
                problem = f"line {number}: custom_id {shown(line.custom_id)} was used before"
                line = Line(f"line-{number}", "", {}, problem)
            seen.add(line.custom_id)
            yield line


def _parse(text: bytes, number: int) -> Line:
    name = f"line-{number}"
    try:
        value = json.loads(text)
    except ValueError as error:
        return Line(name, "", {}, f"line {number} is not JSON: {error}")
    if not isinstance(value, dict):
        return Line(name, "", {}, f"line {number}: must be an object")
    given = value.get("custom_id", name)
    if not isinstance(given, str) or not given:
        return Line(name, "", {}, f"line {number}: custom_id = {shown(given)}: must be a string")
    url, body, method = value.get("url"), value.get("body"), value.get("method", "POST")
    if method != "POST":
        return Line(given, "", {}, f"method = {shown(method)}: must be POST")
    if url not in URLS:
        return Line(given, "", {}, f"url = {shown(url)}: must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return Line(given, "", {}, f"body = {shown(body)}: must be an object")
    if body.get("stream"):
        return Line(given, "", {}, "body.stream = true: replies of a batch come whole")
    return Line(given, url, body)


def read_done(path: str) -> set[str]:
    """The custom_ids that have a reply. A line that was cut when its run ended is cut off.

    Raises: OSError
    """
    file = Path(path)
    if not file.exists():
        return set()
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        file.write_bytes(whole)
    return {json.loads(line)["custom_id"] for line in whole.splitlines()}


# ── the requests ─────────────────────────────────────────────────────────────────────────────


async def run(engine: Engine, lines: Sequence[Line], done: set[str], output: TextIO) -> int:
    """Answers all that are not done. Returns how many got errors."""
    left = [line for line in lines if line.custom_id not in done]
    todo = iter(left)
    failed = 0
    initial = len(lines) - len(left)
    with tqdm(total=len(lines), initial=initial, unit="request", disable=None) as bar:

        async def work() -> None:
            nonlocal failed
            for line in todo:  # shared: each worker takes the next
                reply = await _answer(engine, line)
                failed += reply["error"] is not None
                output.write(json.dumps(reply, ensure_ascii=False) + "\n")
                output.flush()
                bar.update()

        # Twice as many as run at once, so that the scheduler always has one to start.
        workers = [work() for _ in range(2 * engine.config.max_running_requests)]
        await asyncio.gather(*workers)
    return failed


async def _answer(engine: Engine, line: Line) -> dict[str, Any]:
    reply: dict[str, Any] = {"id": f"batch_req_{line.custom_id}", "custom_id": line.custom_id}
    if line.problem:
        error = {"code": "invalid_request", "message": line.problem}
        return {**reply, "response": None, "error": error}
    status, body = await engine.async_post(line.url, line.body)
    response = {"status_code": status, "request_id": reply["id"], "body": body}
    if status == 200:
        return {**reply, "response": response, "error": None}
    message = body.get("error", {}).get("message", "the request failed")
    return {**reply, "response": response, "error": {"code": str(status), "message": message}}


if __name__ == "__main__":
    sys.exit(main())
