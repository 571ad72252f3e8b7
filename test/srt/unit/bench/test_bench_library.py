"""What benchmarks share: clients against scripted servers, processes, rounds, result files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmark.lib import server
from benchmark.lib.client import StreamClient
from benchmark.lib.cpu_time import cpu_seconds, family, family_seconds
from benchmark.lib.rounds import Contestant, Round, play_rounds
from benchmark.lib.server import ServerProcess
from mamba_eagle.bench import results
from mamba_eagle.bench.client import ServerError, generate_all

Answer = Callable[[httpx.Request], httpx.Response]


# ── clients ──────────────────────────────────────────────────────────────────────────────────


def client_of(answer: Answer, **settings: Any) -> StreamClient:
    transport = httpx.MockTransport(answer)
    return StreamClient("http://test", transport=transport, **settings)


def events(*values: Any) -> str:
    return "".join(f"data: {json.dumps(value)}\n\n" for value in values) + "data: [DONE]\n\n"


def test_replies_come_in_the_order_of_their_requests() -> None:
    running = most = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        number = json.loads(request.content)["number"]
        await asyncio.sleep(0.01 * (5 - number))
        running -= 1
        return httpx.Response(200, json={"text": str(number)})

    async def run() -> list[dict[str, Any]]:
        async with client_of(answer) as client:  # type: ignore[arg-type]
            return await client.generate_all([{"number": i} for i in range(5)], parallel=2)

    assert [reply["text"] for reply in asyncio.run(run())] == list("01234")
    assert most == 2


def test_a_stream_gives_its_pieces_and_ends() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content) == {"text": "a", "stream": True}
        assert request.headers["authorization"] == "Bearer key"
        return httpx.Response(200, text=": a comment\n\n" + events({"text": "x"}, {"text": "xy"}))

    async def run() -> list[str]:
        async with client_of(answer, api_key="key") as client:
            async with client.stream({"text": "a"}) as stream:
                return [piece["text"] async for piece in stream]

    assert asyncio.run(run()) == ["x", "xy"]


async def generate(client: StreamClient) -> Any:
    return await client.generate({})


async def stream(client: StreamClient) -> Any:
    async with client.stream({}) as pieces:
        return [piece async for piece in pieces]


async def server_info(client: StreamClient) -> Any:
    return await client.server_info()


REFUSED = {"error": {"message": "text: too long", "code": 400}}


@pytest.mark.parametrize("call", [generate, stream, server_info])
@pytest.mark.parametrize(
    "status, content, message",
    [(400, json.dumps(REFUSED), "text: too long"), (404, "<html>" * 100, "")],
)
def test_a_refusal_has_its_status_and_the_servers_own_words(
    call: Callable[[StreamClient], Any], status: int, content: str, message: str
) -> None:
    async def run() -> Any:
        async with client_of(lambda _: httpx.Response(status, text=content)) as client:
            return await call(client)

    with pytest.raises(ServerError, match=f"http://test answered {status}: ") as error:
        asyncio.run(run())
    assert (error.value.status, error.value.message) == (status, message)
    assert len(str(error.value)) < 250, "a page of HTML is cut"


def test_an_error_in_a_stream_ends_it() -> None:
    content = events({"text": "x"}, {"error": {"message": "the runner died", "code": 500}})

    async def run() -> None:
        async with client_of(lambda _: httpx.Response(200, text=content)) as client:
            await stream(client)

    with pytest.raises(ServerError, match="ended a stream: .*the runner died") as error:
        asyncio.run(run())
    assert error.value.status == 500


def test_text_that_is_not_json_is_no_answer() -> None:
    async def run() -> None:
        async with client_of(lambda _: httpx.Response(200, text="<html>")) as client:
            await generate(client)

    with pytest.raises(ServerError, match="not JSON: <html>") as error:
        asyncio.run(run())
    assert error.value.status == 200


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "h:x"])
def test_a_server_out_of_reach_is_named(url: str) -> None:
    with pytest.raises(ServerError, match=f"no answer from {url}: ") as error:
        generate_all(url, [{}], parallel=1)
    assert error.value.status == 0 and error.value.message


# ── servers ──────────────────────────────────────────────────────────────────────────────────


class Sleeper(ServerProcess):
    """Prints a line, then ignores SIGTERM."""

    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(99)"
    program = (sys.executable, "-uc", code)


def test_a_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    sleeper = Sleeper([], start_seconds=120)
    sleeper.wait_for_output("up")
    assert sleeper.process.poll() is None
    sleeper.stop()
    sleeper.stop()  # is safe to call again
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_server_that_ends_at_its_start_is_not_waited_for() -> None:
    class Ended(ServerProcess):
        program = (sys.executable, "-c", "print('gone')")

    with pytest.raises(RuntimeError, match="--flag did not print 'ready':\ngone"):
        Ended(["--flag"], start_seconds=1000).wait_for_output("ready")
    with pytest.raises(RuntimeError, match="--flag did not answer:\ngone"):
        with Ended(["--flag"], start_seconds=1000):
            pytest.fail("there is no server")


# ── rounds ───────────────────────────────────────────────────────────────────────────────────


def test_contestants_take_turns_and_another_one_begins_each_round() -> None:
    played: list[str] = []

    def play(name: str) -> Round:
        played.append(name)
        return Round(tokens=len(played), seconds=1.0)

    field = [Contestant(name, name, [Round(1, 99.0)]) for name in "abc"]
    play_rounds(field, play, rounds=3)
    assert "".join(played) == "abc" + "bca" + "cab"
    a, b, c = field
    assert a.speeds == [1, 6, 8], "rounds of before are dropped"
    assert (a.median_speed, a.fastest) == (6, 8)
    assert b.ratios(a) == [2, 4 / 6, 9 / 8]


def test_acceptance_is_counted_where_steps_are() -> None:
    assert Round(tokens=12, seconds=2.0, steps=4).accept_length == 3.0
    assert Round(tokens=12, seconds=2.0).accept_length == 1.0


# ── result files ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_is_that_of_all_processes() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in family(os.getpid()) and family(child.pid) == [child.pid]
        child.kill()
    # Between two looks other threads of this process may use any amount.
    before = time.process_time()
    own = cpu_seconds(os.getpid())
    assert before - 0.05 < own < time.process_time() + 0.05
    assert family_seconds(os.getpid()) > own - 0.05


def test_lines_are_added_behind_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    results.append(path, [{"name": "a", "value": 1}, {"name": "ü"}])
    results.append(str(path), [{"name": "b"}])
    assert results.read(path) == [{"name": "a", "value": 1}, {"name": "ü"}, {"name": "b"}]
    assert path.read_text().count("\n") == 3 and "ü" in path.read_text()
    results.write(path, [{"name": "c"}])
    assert results.read(path) == [{"name": "c"}]
