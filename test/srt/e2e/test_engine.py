"""The engine as a library, a file of requests, and a server give the same texts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import psutil
import pytest
import torch
from running_server import RunningServer

from mamba_eagle import Engine, EngineError, run_batch
from mamba_eagle.config import ConfigError
from mamba_eagle.engine_loop import EngineLaunch

GREEDY = {"max_new_tokens": 12, "temperature": 0}


def bodies(count: int) -> list[dict[str, Any]]:
    """Greedy and sampled ones."""
    return [
        {
            "text": f"Question: {number} + {number % 7} =",
            "sampling_params": {
                "max_new_tokens": 4 + number % 9,
                "temperature": 0 if number % 2 else 0.8,
                "sampling_seed": number,
            },
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", dtype="float32", max_running_requests=8) as engine:
        yield engine


def test_library_file_and_server_give_the_same_texts(
    engine: Engine, server: RunningServer, tmp_path: Path
) -> None:
    asked = bodies(50)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/generate", "body": body})
        for i, body in enumerate(asked)
    ]
    lines.insert(3, "{broken")
    lines.insert(9, json.dumps({"custom_id": "no", "url": "/v2", "body": {}}))
    lines.insert(9, json.dumps({"custom_id": "bad", "url": "/generate", "body": {"text": 1}}))
    source.write_text("\n".join(lines))
    # As if an earlier run had been killed in the middle of its second line.
    target.write_text('{"custom_id": "7", "response": {"body": {"text": "old"}}}\n{"custom_')

    async def by_library() -> list[str]:
        replies = await asyncio.gather(*[engine.async_generate(**_as_call(one)) for one in asked])
        return [reply["text"] for reply in replies]

    async def by_file() -> int:
        done = run_batch.read_done(str(target))
        with open(target, "a", encoding="utf-8") as output:
            return await run_batch.run(
                engine, list(run_batch.read_lines(str(source))), done, output
            )

    texts = asyncio.run(by_library())
    with httpx.Client(base_url=server.base_url, timeout=120) as client:
        assert [client.post("/generate", json=body).json()["text"] for body in asked] == texts
    assert asyncio.run(by_file()) == 3
    replies = {line["custom_id"]: line for line in map(json.loads, target.open())}
    assert len(replies) == 53
    assert replies["7"]["response"]["body"]["text"] == "old"
    for i, text in enumerate(texts):
        if i != 7:
            assert replies[str(i)]["response"]["body"]["text"] == text
            assert replies[str(i)]["error"] is None
    assert "line 4 is not JSON" in replies["line-4"]["error"]["message"]
    assert '"/v2"' in replies["no"]["error"]["message"]
    assert replies["bad"]["response"]["status_code"] == 400
    with pytest.raises(ConfigError, match="in.jsonl: line 1 is not a reply: name a new file"):
        run_batch.read_done(str(source))


def test_a_run_that_goes_on_counts_the_errors_of_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    ids = ("right", "wrong", "left")
    source.write_text(
        "\n".join(json.dumps({"custom_id": i, "url": "/generate", "body": body}) for i in ids)
    )
    done = {"right": None, "wrong": {"code": "400"}, "of another file": {"code": "400"}}
    replies = [{"custom_id": i, "response": {}, "error": error} for i, error in done.items()]
    target.write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    assert run_batch.main([str(source), str(target), "--device", "cpu"]) == 1
    assert "3 requests, 2 of them done before, 1 with errors" in capsys.readouterr().out


def _as_call(body: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": body["text"], "sampling_params": body["sampling_params"]}


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "out.jsonl: No space left"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again"),
    ],
    ids=["full disk", "Ctrl-C"],
)
def test_a_run_says_what_ended_it(
    ends: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source := tmp_path / "in.jsonl").write_text("")
    monkeypatch.setattr(run_batch, "Engine", lambda **settings: contextlib.nullcontext())
    monkeypatch.setattr(run_batch, "run", Mock(side_effect=ends))
    assert run_batch.main([str(source), str(tmp_path / "out.jsonl")]) == code
    assert said in capsys.readouterr().err


def test_one_process_gives_the_texts_of_three(engine: Engine) -> None:
    """And everything else that an engine does. It leaves no thread behind."""
    texts, sampling = zip(*((one["text"], one["sampling_params"]) for one in bodies(50)))
    expected = [reply["text"] for reply in engine.generate(list(texts), list(sampling))]
    children = psutil.Process().children()
    settings = {"device": "cpu", "dtype": "float32", "max_running_requests": 8}
    with Engine(in_process=True, **settings) as one:
        assert psutil.Process().children() == children
        found = [reply["text"] for reply in one.generate(list(texts), list(sampling))]
        assert found == expected
        for both in (one, engine):
            pieces = both.stream("Question: 2 + 3 =", {"max_new_tokens": 900, "ignore_eos": True})
            assert not next(pieces)["meta_info"]["finish_reason"], "it comes in pieces"
            pieces.close()
        assert one.score("2 + 3 =", [" 5", " 7"]) == pytest.approx(
            engine.score("2 + 3 =", [" 5", " 7"]), abs=1e-4
        )
        for own, other in zip(one.embed(["a", "b"]), engine.embed(["a", "b"]), strict=True):
            assert own == pytest.approx(other, abs=1e-5)
        chat = {"messages": [{"role": "user", "content": "2 + 3"}], "max_tokens": 9}
        alone, three = one.chat(**chat, temperature=0), engine.chat(**chat, temperature=0)
        assert alone["choices"][0]["message"] == three["choices"][0]["message"]
        with pytest.raises(EngineError, match="temperature = -1.0"):
            one.generate("x", {"temperature": -1})
        assert one.generate("2 + 3 =", {**GREEDY, "regex": "(yes|no)!"})["text"] in ("yes!", "no!")

        async def by_loop() -> str:
            return (await one.async_generate(texts[1], sampling[1]))["text"]

        assert asyncio.run(by_loop()) == expected[1]
        endless = one.stream("Question:", {"max_new_tokens": 900, "ignore_eos": True})
        next(endless)
    with pytest.raises(EngineError):  # the engine was closed in the middle
        list(endless)
    left = {thread.name for thread in threading.enumerate()}
    assert left.isdisjoint({"mamba-eagle scheduler", "mamba-eagle runner"})
    with pytest.raises(EngineError, match="closed"):
        one.generate("x")


@pytest.mark.parametrize("in_process", [False, True], ids=["processes", "threads"])
def test_a_closed_engine_leaves_neither_memory_nor_files(in_process: bool) -> None:
    """Its model lay in the caller's process for ever, and with it all that the caller had made."""

    def ask() -> weakref.ref[Any]:
        with Engine(device="cpu", in_process=in_process) as engine:
            engine.generate("2 + 3 =", GREEDY)
            return weakref.ref(engine.tokenizer)

    ask()  # imports open files, too
    frozen, files = gc.get_freeze_count(), psutil.Process().num_fds()
    tokenizer, deadline = ask(), time.monotonic() + 60
    gc.collect()
    assert tokenizer() is None
    assert gc.get_freeze_count() <= frozen  # of those before it some may have gone
    while psutil.Process().num_fds() > files:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_engine_without_a_tokenizer_tries_no_grammars(caplog: pytest.LogCaptureFixture) -> None:
    """The process that would try them looked for its tokens."""
    with Engine(device="cpu", skip_tokenizer_init=True) as engine:
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    del engine
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_ctrl_c_while_it_starts_ends_it(
    engine: Engine, ctrl_c: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on starting, and Python waited for its thread for ever."""
    threads, start = set(threading.enumerate()), EngineLaunch.start_engine

    def interrupted(launch: EngineLaunch) -> None:
        start(launch)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(EngineLaunch, "start_engine", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Engine(device="cpu")
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert "mamba-eagle engine" not in left


def test_a_fork_is_told_that_the_engine_is_not_its_own(engine: Engine) -> None:
    """It waited for ever for a thread that it does not have."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            engine.generate("2 + 3 =", GREEDY)
        except EngineError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 60)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ready and b"the process that forked this one" in os.read(reading, 1000)
    os.close(reading)
    assert engine.generate("2 + 3 =", GREEDY)["text"]


def test_a_text_has_one_vector(engine: Engine) -> None:
    assert engine.embed("abc") == engine.embed(["abc"])


def test_a_request_after_the_last_turn_of_the_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came between the end of the engine and that of its thread, and waited for ever."""
    with Engine(device="cpu", in_process=True, speculative_algorithm="NONE") as engine:
        loop, errors = engine._launch.loop, []

        def late() -> None:
            with pytest.raises(EngineError, match="closed") as error:
                engine.generate("1")
            errors.append(error.value.status)

        caller, asked, close = threading.Thread(target=late), threading.Event(), loop.close
        wake = loop.call_soon_threadsafe

        def close_with_a_request() -> None:
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (wake(*a), asked.set()))
            caller.start()
            assert asked.wait(10)
            close()

        monkeypatch.setattr(loop, "close", close_with_a_request)
    caller.join(10)
    assert errors == [503]
    with pytest.raises(EngineError, match="closed"):
        engine.generate("1")


def test_a_closed_engine_has_given_its_memory_back() -> None:
    """Of one process, whose model and pools Python might keep until they are in somebody's way."""

    def held() -> int:
        return sum(one.nbytes for one in gc.get_objects() if issubclass(type(one), torch.Tensor))

    gc.collect()
    before = held()
    engine = Engine(in_process=True, device="cpu", max_total_tokens=500)
    assert held() > before + 10_000_000
    engine.close()
    assert held() <= before


def test_one_process_says_why_it_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in_process: --tp-size 2 and --pp-size 1 need 2 proc"):
        Engine(in_process=True, tp_size=2)
    with pytest.raises(EngineError, match="supports at most"):
        Engine(in_process=True, device="cpu", context_length=10**7)


def test_streams_in_pieces(engine: Engine) -> None:
    whole = engine.generate("Question: 2 + 3 =", GREEDY)
    assert (
        "".join(piece["text"] for piece in engine.stream("Question: 2 + 3 =", GREEDY))
        == (whole["text"])
    )

    async def by_loop() -> str:
        pieces = engine.async_stream("Question: 2 + 3 =", GREEDY)
        return "".join([piece["text"] async for piece in pieces])

    assert asyncio.run(by_loop()) == whole["text"]
    for _ in engine.stream("Question:", {"max_new_tokens": 900, "ignore_eos": True}):
        break  # which ends the request
    assert engine._launch.manager.num_live == 0
    reply = engine.chat([{"role": "user", "content": "2 + 3"}], max_tokens=3, temperature=0)
    assert reply["usage"]["completion_tokens"] == 3


def test_scores_are_the_models_own(engine: Engine) -> None:
    """A greedy continuation is likelier than others, and texts add up."""
    best = engine.generate("Question: 2 + 3 =", {"max_new_tokens": 1, "temperature": 0})["text"]
    scores = engine.score("Question: 2 + 3 =", [best, " 7", " 7 buses"])
    assert scores[0] > scores[1] > scores[2]


def test_numbers_may_be_numpys(engine: Engine) -> None:
    plain, own = [[5, 6], [7, 8]], {"max_new_tokens": 4, "temperature": 0}
    given = engine.generate(input_ids=np.array(plain), sampling_params={**own, "n": np.int64(1)})
    expected = engine.generate(input_ids=plain, sampling_params=own)
    assert [one["output_ids"] for one in given] == [one["output_ids"] for one in expected]


def test_errors_are_those_of_the_server(engine: Engine) -> None:
    with pytest.raises(EngineError, match="temperature = -1.0") as refused:
        engine.generate("x", {"temperature": -1})
    assert refused.value.status == 400
    with pytest.raises(EngineError, match="temperature = NaN"):
        engine.generate("x", {"temperature": float("nan")})
    with pytest.raises(TypeError, match="JSON values, arrays and tensors, not <class 'object'>"):
        engine.generate("x", {"temperature": object()})
    with pytest.raises(EngineError, match="use stream"):
        engine.generate("x", stream=True)
    with pytest.raises(EngineError, match="max_new_tokens"):
        next(engine.stream("x", {"max_new_tokens": -1}))
    with pytest.raises(ConfigError, match="speculative_steps"):
        Engine(speculative_steps=3)
    with pytest.raises(ConfigError, match="--quantization 'fp4': must be one of auto, fp8"):
        Engine(quantization="fp4")
    with pytest.raises(ConfigError, match="--constrained-json-whitespace-pattern"):
        Engine(constrained_json_whitespace_pattern="[ ")
    for folder in ("/no/such/model", Path("/no/such/model")):
        with pytest.raises(ConfigError, match="--model-path /no/such"):
            Engine(folder)
