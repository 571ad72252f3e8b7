"""``mamba-eagle run-batch IN.jsonl OUT.jsonl``: answers a file of requests, without a server.

Lines are those of OpenAI's batches (server/apis/batches/lines.py). Each gets a line in OUT with its
custom_id, in the order in which they are done. Lines that OUT has already are skipped, so that a
run which was ended goes on where it was. A line that is wrong gets an error of its own.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Container, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from mamba_eagle.config import ConfigError, Parser, ServerConfig, add_arguments, from_arguments
from mamba_eagle.engine import Engine, EngineError
from mamba_eagle.server.apis.batches.lines import Line, read_lines

REPLY = itemgetter("custom_id", "response")


def make_parser() -> Parser:
    parser = Parser(
        usage="%(prog)s [-h] IN OUT [options]", description="Answer a file of requests."
    )
    parser.add_argument("input", metavar="IN", help="requests in JSON, one per line")
    parser.add_argument("output", metavar="OUT", help="replies are added to this file")
    add_arguments(parser, ServerConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every line was answered, 1 if some got errors, now or before, 2 if nothing
    could run or be written, 130 after Ctrl-C."""
    arguments = make_parser().parse_args(argv)
    config: ServerConfig = from_arguments(ServerConfig, arguments)
    try:
        lines = list(read_lines(arguments.input))
        done = read_done(arguments.output)
        # Half of a surrogate pair, in a name, is written as JSON escapes it.
        with open(arguments.output, "a", encoding="utf-8", errors="backslashreplace") as output:
            settings = {**vars(config), "log_level": "warning"}
            with Engine(**settings) as engine:
                failed = asyncio.run(run(engine, lines, done, output))
    except OSError as error:
        print(f"{error.filename or arguments.output}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ConfigError, EngineError) as error:
        print(error, file=sys.stderr)
        return 2
    before = [done[line.custom_id] for line in lines if line.custom_id in done]
    failed += sum(before)
    print(f"{len(lines)} requests, {len(before)} of them done before, {failed} with errors")
    return 1 if failed else 0


# ── the files ────────────────────────────────────────────────────────────────────────────────


def read_done(path: str) -> dict[str, bool]:
    """Whether each reply is an error, by the custom_ids that have one. A line that was cut when its
    run ended is cut off.

    Raises: OSError; ConfigError if it has other lines than replies: it is another file.
    """
    file = Path(path)
    if not file.exists():
        return {}
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    done = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            reply = json.loads(line)
            custom_id, _ = REPLY(reply)
            done[custom_id] = reply.get("error") is not None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                [f"{path}: line {number} is not a reply: name a new file, or that of an ended run"]
            ) from None
    if len(whole) < len(text):
        file.write_bytes(whole)
    return done


# ── the requests ─────────────────────────────────────────────────────────────────────────────


async def run(engine: Engine, lines: Sequence[Line], done: Container[str], output: TextIO) -> int:
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
    if line.problem:
        return line.refused()
    return line.answered(*await engine.async_post(line.url, json.loads(line.body)))


if __name__ == "__main__":
    sys.exit(main())
