"""What one hostile client does to the others: their streams, /health and the server's memory.

    python -m benchmark.flood --label after --results benchmark/results/reliability.jsonl
    python -m benchmark.flood --source /path/to/other/python --label before

Starts a server from ``--source`` and keeps 16 streams running on it. Each attack is a window in
which another process sends one kind of body over and over, between two windows without it. A line
per attack has the gaps between a stream's events, the time that GET /health takes on a fresh
connection, and the memory of all server processes, in both kinds of window. Exits with 1 if the
server died or a stream's text differed from the first one for its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.lib.attacks import ATTACKS, BOMBS, CONTROL, MIB
from benchmark.lib.server import PACKAGE_ROOT, ServerProcess, exit_on_sigterm
from mamba_eagle.bench import results
from mamba_eagle.bench.facts import facts

TOKENS = 400  # of one stream's request
HEALTH_INTERVAL = 0.02  # seconds


# ── what is measured ─────────────────────────────────────────────────────────────────────────


@dataclass
class Window:
    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream
    health: list[float] = field(default_factory=list)  # seconds for one GET /health
    memory: int = 0  # peak of all processes together, bytes


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def resident(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


class Streams:
    """The well-behaved clients."""

    def __init__(self, port: int, pids: list[int]) -> None:
        self.port = port
        self.pids = pids
        self.window = Window()
        self.last_event: dict[int, float] = {}
        self.texts: dict[int, str] = {}
        self.different = 0
        self.failed = 0

    async def run(self, count: int) -> None:
        await asyncio.gather(
            self._probe(), self._watch_memory(), *(self._stream(i) for i in range(count))
        )

    async def _stream(self, number: int) -> None:
        while True:
            try:
                await self._one_request(number)
            except (OSError, asyncio.IncompleteReadError, ValueError):
                self.failed += 1
                await asyncio.sleep(0.5)

    async def _one_request(self, number: int) -> None:
        body = {
            "text": f"Question: Tom has {number} apples and buys {number + 3} more. How many",
            "stream": True,
            "sampling_params": {
                "max_new_tokens": TOKENS,
                "ignore_eos": True,
                "sampling_seed": number,
            },
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=64 * MIB)
        try:
            writer.write(_request("POST", "/generate", _json(body)))
            last = b""
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                # The first event of a request waits for its turn, which is no gap.
                if last:
                    self.window.gaps.append(now - self.last_event[number])
                self.last_event[number] = now
                last = line
            event = json.loads(last.removeprefix(b"data: "))
            if "text" not in event or not event["meta_info"]["finish_reason"]:
                raise ValueError(event)
            self.different += self.texts.setdefault(number, event["text"]) != event["text"]
        finally:
            self.last_event.pop(number, None)
            writer.close()

    async def _probe(self) -> None:
        while True:
            begin = time.monotonic()
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(_request("GET", "/health", b""))
                await reader.read()
                writer.close()
                self.window.health.append(time.monotonic() - begin)
            await asyncio.sleep(HEALTH_INTERVAL)

    async def _watch_memory(self) -> None:
        while True:
            self.window.memory = max(self.window.memory, resident(self.pids))
            await asyncio.sleep(0.1)

    def begin_window(self) -> None:
        self.window = Window(memory=resident(self.pids))

    def end_window(self) -> Window:
        """Streams that stand still have a gap, too."""
        now = time.monotonic()
        self.window.gaps += [now - last for last in self.last_event.values()]
        return self.window


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


# ── the run ──────────────────────────────────────────────────────────────────────────────────


async def quiet(streams: Streams, seconds: float) -> Window:
    """A window without an attack, once all streams flow and /health answers at once."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        streams.begin_window()
        await asyncio.sleep(0.5)
        if len(streams.window.health) > 3 and percentile(streams.end_window().gaps, 1.0) < 1:
            break
    streams.begin_window()
    await asyncio.sleep(seconds)
    return streams.end_window()


async def flood(
    streams: Streams, name: str, port: int, seconds: float
) -> tuple[Window, Counter[str]]:
    """A window with the attack: ``seconds``, and until one request was answered, but no more than a
    minute."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmark.lib.attacks", str(port), name),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    answers: Counter[str] = Counter()

    async def count(output: asyncio.StreamReader) -> None:
        async for line in output:
            answers[line.split()[0].decode()] += 1

    await process.stdout.readline()
    counting = asyncio.ensure_future(count(process.stdout))
    streams.begin_window()
    begin = time.monotonic()
    unanswered = 0.0 if name == CONTROL else 60.0
    while (passed := time.monotonic() - begin) < seconds or (not answers and passed < unanswered):
        await asyncio.sleep(0.05)
    window = streams.end_window()
    process.kill()
    await process.wait()
    await counting
    return window, answers


async def measure(args: argparse.Namespace, port: int, pids: list[int]) -> bool:
    """Whether the server and all streams came through unharmed."""
    streams = Streams(port, pids)
    running = asyncio.ensure_future(streams.run(args.streams))
    made_on = facts("cpu") if args.results else {}
    try:
        await quiet(streams, 3)
        for name in args.only or [CONTROL, *ATTACKS, *BOMBS]:
            before = await quiet(streams, args.seconds)
            during, answers = await flood(streams, name, port, args.seconds)
            after = await quiet(streams, args.seconds)
            line = summary(name, [before, after], during, answers)
            line |= {"label": args.label, "streams": args.streams}
            print(show(line), flush=True)
            if args.results:
                results.append(args.results, [{**line, **made_on}])
            if not all(Path(f"/proc/{pid}").exists() for pid in pids):
                print("the server died", file=sys.stderr)
                return False
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    print(f"{streams.different} texts differed, {streams.failed} streams failed")
    return not streams.different and not streams.failed


def summary(
    name: str, quiet_windows: list[Window], during: Window, answers: Counter[str]
) -> dict[str, Any]:
    gaps = [gap for window in quiet_windows for gap in window.gaps]
    health = [value for window in quiet_windows for value in window.health]

    def ms(values: list[float], share: float) -> float:
        return round(percentile(values, share) * 1000, 1)

    return {
        "name": "flood",
        "attack": name,
        "answers": dict(answers),
        "quiet_gap_p99_ms": ms(gaps, 0.99),
        "flood_gap_p99_ms": ms(during.gaps, 0.99),
        "flood_gap_max_ms": ms(during.gaps, 1.0),
        "gap_p99_ratio": round(percentile(during.gaps, 0.99) / percentile(gaps, 0.99), 2),
        "quiet_health_p99_ms": ms(health, 0.99),
        "flood_health_p99_ms": ms(during.health, 0.99),
        "flood_health_max_ms": ms(during.health, 1.0),
        "memory_more_mb": round((during.memory - quiet_windows[0].memory) / 1e6),
    }


def show(line: dict[str, Any]) -> str:
    return (
        f"{line['attack']:31s} gap p99 {line['quiet_gap_p99_ms']:6.1f} -> "
        f"{line['flood_gap_p99_ms']:8.1f} (x{line['gap_p99_ratio']:.2f}, "
        f"max {line['flood_gap_max_ms']:.0f}) health p99 {line['quiet_health_p99_ms']:5.1f} -> "
        f"{line['flood_health_p99_ms']:8.1f} ms, memory +{line['memory_more_mb']} MB, "
        f"{line['answers']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--source", default=str(PACKAGE_ROOT), help="folder of the package to serve"
    )
    parser.add_argument("--label", default="", help="goes into each result line")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    names = [CONTROL, *ATTACKS, *BOMBS]
    parser.add_argument("--only", nargs="*", choices=names, help="these attacks alone")
    parser.add_argument("--results", default="", help="append a line per attack to this file")
    parser.add_argument("flags", nargs="*", help="for the server, after --")
    args = parser.parse_args()
    exit_on_sigterm()
    with ServerProcess(args.flags, environment={"PYTHONPATH": args.source}) as server:
        unharmed = asyncio.run(measure(args, server.port, list(server.pids().values())))
    sys.exit(0 if unharmed else 1)


if __name__ == "__main__":
    main()
