"""/v1/files and /v1/batches over the fake engine: in the forms that OpenAI's clients send."""

from __future__ import annotations

import asyncio
import errno
import io
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import length_of
from server_harness import Harness, run, says, serving, silent
from tiny_tokenizer import spell

from mamba_eagle.message import Generate
from mamba_eagle.server.apis.batches import batch as batches
from mamba_eagle.server.apis.batches import lines
from mamba_eagle.server.apis.batches.batch import _reply
from mamba_eagle.server.apis.batches.lines import Line, read_lines

URL = "/v1/completions"
RIGHT = {"prompt": "a", "max_tokens": 2}


def request_line(custom_id: Any, body: Any = RIGHT, url: str = URL) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


async def heard(server: Harness, count: int) -> None:
    """Until the engine has this many requests."""
    while len(server.engine.of(Generate)) < count:
        await asyncio.sleep(0.01)


async def upload(server: Harness, text: str, key: str = "", **form: str) -> httpx.Response:
    return await server.client.post(
        "/v1/files",
        data={"purpose": "batch", **form},
        files={"file": ("in.jsonl", text.encode(), "application/jsonl")},
        headers={"x-api-key": key},
    )


async def started(server: Harness, text: str, key: str = "", **others: Any) -> dict[str, Any]:
    file = (await upload(server, text, key)).json()
    body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **others}
    reply = await server.client.post("/v1/batches", json=body, headers={"x-api-key": key})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


async def ended(server: Harness, id: str, key: str = "") -> dict[str, Any]:
    while True:
        headers = {"x-api-key": key}
        found: dict[str, Any] = (
            await server.client.get(f"/v1/batches/{id}", headers=headers)
        ).json()
        if found["status"] in batches.ENDED:
            return found
        await asyncio.sleep(0.01)


async def replies(server: Harness, id: str | None, key: str = "") -> dict[str, Any]:
    if id is None:
        return {}
    path, headers = f"/v1/files/{id}/content", {"x-api-key": key}
    text = (await server.client.get(path, headers=headers)).text
    return {one["custom_id"]: one for one in map(json.loads, text.splitlines())}


def test_each_line_is_a_request_and_wrong_ones_end_nothing() -> None:
    text = "\n".join(
        [
            *(request_line(f"r{i}", {**RIGHT, "echo": bool(i % 2)}) for i in range(20)),
            request_line("bad", {"prompt": "a", "max_tokens": -1}),
            request_line("half \ud800", {"prompt": "\ud800"}),
            request_line("r0"),
            request_line("other", url="/v1/embeddings"),
            request_line("streams", {**RIGHT, "stream": True}),
            "",
            "no JSON",
            "[1]",
            request_line(5),
            f'{{"custom_id": "deep", "url": "{URL}", "body": {{"a": {"[" * 960}{"]" * 960}}}}}',
        ]
    )

    async def test() -> None:
        async with serving(says("xyz")) as server:
            made = await started(server, text, metadata={"a": "b"})
            assert made["status"] == "validating" and made["object"] == "batch"
            found = await ended(server, made["id"])
            assert found["status"] == "completed" and found["metadata"] == {"a": "b"}
            assert found["request_counts"] == {"total": 29, "completed": 20, "failed": 9}
            right = await replies(server, found["output_file_id"])
            assert set(right) == {f"r{i}" for i in range(20)}
            for i in range(20):
                response, error = right[f"r{i}"]["response"], right[f"r{i}"]["error"]
                assert response["status_code"] == 200 and error is None
                assert response["body"]["choices"][0]["text"] == "a" * (i % 2) + "xy"
            wrong = await replies(server, found["error_file_id"])
            said = {name: one["error"]["message"] for name, one in wrong.items()}
            for name, part in {
                "bad": "max_tokens = -1",
                "half \ud800": "valid Unicode",
                "line-23": "was used before",
                "other": f"must be {URL}",
                "streams": "come whole",
                "line-27": "is not JSON",
                "line-28": "must be an object",
                "line-29": "custom_id = 5",
                "line-30": "deep within each other",
            }.items():
                assert part in said[name], (name, said)
            assert wrong["bad"]["response"]["status_code"] == 400
            names = ["created_at", "in_progress_at", "finalizing_at", "completed_at"]
            assert all(found[name] for name in names) and found["cancelled_at"] is None

    run(test())


def test_a_long_reply_stands_in_its_line_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read and write it again would hold up all others: it may have a million logprobs."""
    line, ends = Line('a "body": null', URL, b""), "\x85\u2028\u2029 é"
    body = msgspec.json.encode({"text": ends})
    monkeypatch.setattr(batches, "PIECE", 5)
    reply = asyncio.run(_reply(line, 200, body))
    (text,) = b"".join(reply.parts).decode().splitlines()
    made = json.loads(text)
    assert made["custom_id"] == line.custom_id and made["response"]["body"] == {"text": ends}
    assert not reply.is_error and made == line.answered(200, {"text": ends})


@pytest.mark.parametrize("inner, what", [("[]", "arrays and objects"), ('"a"', "strings")])
def test_a_line_may_have_as_much_in_it_as_a_body(inner: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    many = ",".join([inner] * 100_000)
    path.write_text(f'{{"url": "{URL}", "body": {{"prompt": [{many}]}}}}\n')
    (line,) = read_lines(path, (URL,))
    assert line.problem.startswith("line 1 has 100") and what in line.problem


def test_a_long_body_is_sent_as_it_stands_in_its_line(tmp_path: Path) -> None:
    """To read and write two million token ids once more would hold up all others."""
    path = tmp_path / "lines.jsonl"
    body = '{"prompt":  ' + json.dumps([7] * 20_000) + ', "stream": %s}'
    body_lines = [f'{{"url": "{URL}", "body": {body % streams}}}' for streams in ("0", "true")]
    body_lines += ["[" + body_lines[0] + "]", body_lines[0].replace('{"prompt"', '[{"prompt"')]
    path.write_text("\n".join(body_lines))
    sent, *wrong = read_lines(path, (URL,))
    assert sent.body.decode() == body % 0 and not sent.problem
    for line, part in zip(wrong, ("stream = true", "not JSON", "not JSON")):
        assert part in line.problem and not line.body


def test_half_of_what_the_engine_runs_at_most_is_with_it() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            made = await started(server, "\n".join(request_line(str(i)) for i in range(30)))
            await heard(server, 4)
            other = await started(server, "\n".join(request_line(str(i)) for i in range(30)))
            await asyncio.sleep(0.1)
            assert len(server.engine.of(Generate)) == 4
            reply = await server.client.post(f"/v1/batches/{made['id']}/cancel")
            assert reply.json()["status"] in ("cancelling", "cancelled")
            found = await ended(server, made["id"])
            assert found["status"] == "cancelled" and found["output_file_id"] is None
            await heard(server, 8)  # the other batch has their places
            await server.client.post(f"/v1/batches/{other['id']}/cancel")
            await ended(server, other["id"])
            assert server.manager.num_live == 0
            again = await server.client.post(f"/v1/batches/{made['id']}/cancel")
            assert again.json()["status"] == "cancelled"

    run(test())


def test_a_file_that_is_removed_is_answered_by_all_batches_that_have_begun() -> None:
    """One that waits for the places of another one had not opened it yet."""

    async def test() -> None:
        async with serving(says("x")) as server:
            text = "\n".join(request_line(str(i)) for i in range(30))
            file = (await upload(server, text)).json()["id"]
            body = {"input_file_id": file, "endpoint": URL}
            made = [(await server.client.post("/v1/batches", json=body)).json() for _ in "abc"]
            assert (await server.client.delete(f"/v1/files/{file}")).status_code == 200
            for one in made:
                found = await ended(server, one["id"])
                assert found["request_counts"]["completed"] == 30, found
            store = server.app.state.batches.files
            assert len(list(store._folder.iterdir())) == len(store.of("")) == 3

    run(test())


def test_what_was_answered_before_a_cancel_stays() -> None:
    def script(request: Generate) -> Any:
        return (spell("x"), length_of(spell("x"))) if request.token_ids == spell("a") else None

    async def test() -> None:
        async with serving(script) as server:
            stuck = [request_line(str(i), {"prompt": "b"}) for i in range(8)]
            made = await started(server, "\n".join([request_line("done"), *stuck]))
            path = f"/v1/batches/{made['id']}"
            while not (await server.client.get(path)).json()["request_counts"]["completed"]:
                await asyncio.sleep(0.01)
            await server.client.post(f"{path}/cancel")
            found = await ended(server, made["id"])
            assert list(await replies(server, found["output_file_id"])) == ["done"]

    run(test())


def test_a_full_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FULL_PAUSE", 0.01)

    async def test() -> None:
        async with serving(silent, max_queued_requests=0) as server:
            fill = asyncio.ensure_future(server.post("/generate", text=["a"] * 8, rid="fill"))
            await heard(server, 8)
            server.engine.script = says("x")
            made = await started(server, request_line("r"))
            await asyncio.sleep(0.1)
            await server.post("/abort_request", rid="fill")
            await fill
            found = await ended(server, made["id"])
            assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    run(test())


def test_files_are_kept_listed_and_deleted() -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            ids = [(await upload(server, f"{i}")).json()["id"] for i in range(3)]
            first = (await server.client.get(f"/v1/files/{ids[0]}")).json()
            assert first["bytes"] == 1 and first["filename"] == "in.jsonl"
            assert (first["object"], first["purpose"]) == ("file", "batch")
            assert (await server.client.get(f"/v1/files/{ids[0]}/content")).text == "0"
            page = (await server.client.get("/v1/files?limit=2&purpose=batch")).json()
            assert [one["id"] for one in page["data"]] == [ids[2], ids[1]] and page["has_more"]
            page = (await server.client.get(f"/v1/files?after={page['last_id']}")).json()
            assert [one["id"] for one in page["data"]] == [ids[0]] and not page["has_more"]
            gone = await server.client.delete(f"/v1/files/{ids[1]}")
            assert gone.json() == {"id": ids[1], "object": "file", "deleted": True}
            assert (await server.client.get(f"/v1/files/{ids[1]}")).status_code == 404
            assert (await server.client.get("/v1/files?purpose=batch_output")).json()["data"] == []
            for query in ("limit=0", "limit=x", "limit=0000000012345", "after=file-no"):
                assert (await server.client.get(f"/v1/files?{query}")).status_code == 400

    run(test())


def test_files_and_batches_are_their_keys() -> None:
    """And a batch's requests carry its key."""

    async def test() -> None:
        async with serving(says("x"), api_key=["one", "two"]) as server:
            made = await started(server, request_line("r"), "one")
            found = await ended(server, made["id"], "one")
            assert found["request_counts"]["completed"] == 1
            for path in (f"/v1/batches/{made['id']}", f"/v1/files/{found['output_file_id']}"):
                for key, status in (("one", 200), ("two", 404), ("", 401)):
                    reply = await server.client.get(path, headers={"x-api-key": key})
                    assert reply.status_code == status, reply.text
            listed = await server.client.get("/v1/batches", headers={"x-api-key": "two"})
            assert listed.json()["data"] == []
            body = {"input_file_id": made["input_file_id"], "endpoint": URL}
            reply = await server.client.post("/v1/batches", json=body, headers={"x-api-key": "two"})
            assert reply.status_code == 404 and "input_file_id" in reply.text

    run(test())


def test_what_does_not_fit_is_refused_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_FILES_BYTES", 600)
    monkeypatch.setattr(batches, "MAX_FILES", 3)
    monkeypatch.setattr(lines, "MAX_BATCH_LINE", 200)

    async def test() -> None:
        async with serving(says("x")) as server:
            first = (await upload(server, "x" * 550)).json()["id"]
            reply = await upload(server, "x" * 51)
            assert reply.status_code == 413 and "delete some" in reply.text
            made = await started(server, "x")
            found = await ended(server, made["id"])
            assert found["status"] == "failed" and "delete some" in str(found["errors"])
            await server.client.delete(f"/v1/files/{first}")
            made = await started(server, "x" * 201 + "\n")
            found = await ended(server, made["id"])
            (wrong,) = (await replies(server, found["error_file_id"])).values()
            assert "more than 200 bytes" in wrong["error"]["message"]
            assert (await upload(server, "x")).status_code == 413

    run(test())


def test_a_full_disk_takes_no_room_and_leaves_no_half_of_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file that could not be written took a key's room for as long as the server ran."""
    left = 2000  # bytes

    class Disk(io.FileIO):
        def write(self, text: Any) -> int:
            nonlocal left
            super().write(text[:left])
            left = max(0, left - len(text))
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(text)

    async def test() -> None:
        nonlocal left
        async with serving(says("x")) as server:
            server.client._transport.raise_app_exceptions = False
            store = server.app.state.batches.files
            made = await started(server, "\n".join(request_line(f"r{i}") for i in range(20)))
            before = store._used[""]
            monkeypatch.setattr(batches, "open", Disk, raising=False)
            found = await ended(server, made["id"])
            assert found["status"] == "failed" and "server log" in str(found["errors"])
            assert 0 < len(await replies(server, found["output_file_id"])) < 20
            left = 100
            assert (await upload(server, "x" * 200)).status_code == 500
            (made_file,) = [file for file in store.of("") if file.purpose != "batch"]
            assert store._used[""] == before + made_file.size
            assert len(list(store._folder.iterdir())) == 2

    run(test())


FORM = "multipart/form-data; boundary=a"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose = "),
    ({"data": {"purpose": "batch", "file": "x"}, "files": {"other": b""}}, "file is needed"),
    ({"files": {"file": b"x"}}, "purpose = null"),
    ({"json": {"purpose": "batch"}}, "multipart/form-data"),
    (
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        "form cannot be read",
    ),
    (
        {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}},
        "form cannot be read",
    ),
    (
        {"content": b"x", "headers": {"content-type": f"{FORM}; b=" + ";" * 2000}},
        "comes as multipart/form-data",
    ),
    # character sets of Python's that take seconds, or give halves of surrogate pairs
    *(
        ({"content": b"x", "headers": {"content-type": f"{FORM}; charset{charset}"}}, "in UTF-8")
        for charset in ("=punycode", " = utf-7", '=utf-8; charset="unicode_escape"; x="')
    ),
]


def test_bad_forms_and_bodies_are_named() -> None:
    async def test() -> None:
        async with serving(says("x")) as server:
            for asked, part in BAD:
                reply = await server.client.post("/v1/files", **asked)
                assert reply.status_code in (400, 415) and part in reply.text, reply.text
            file = (await upload(server, "x")).json()["id"]
            for body, part in (
                ({"endpoint": URL}, "input_file_id"),
                ({"input_file_id": file, "endpoint": "/v1/x"}, "endpoint = "),
                ({"input_file_id": file, "endpoint": URL, "completion_window": "1h"}, "must be"),
                ({"input_file_id": file, "endpoint": URL, "metadata": {"a": "\ud800"}}, "Unicode"),
                ({"input_file_id": file, "endpoint": URL, "metadata": {"\ud800": ""}}, "Unicode"),
                ({"input_file_id": file, "endpoint": URL, "metadata": {"a": [1]}}, "metadata.a"),
            ):
                reply = await server.client.post("/v1/batches", content=json.dumps(body))
                assert reply.status_code == 400 and part in reply.text, reply.text
            empty = await started(server, "\n\n")
            found = await ended(server, empty["id"])
            assert found["status"] == "failed" and "0 requests" in str(found["errors"])

    run(test())


def test_a_client_that_leaves_its_upload_is_not_a_failure_of_the_server() -> None:
    heard = [
        {"type": "http.request", "body": b"--a\r\n", "more_body": True},
        {"type": "http.disconnect"},
    ]
    statuses: list[int] = []

    async def receive() -> Any:
        return heard.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    async def test() -> None:
        async with serving(says("x")) as server:
            headers = [(b"content-type", FORM.encode())]
            path = {"path": "/v1/files", "raw_path": b"/v1/files", "query_string": b""}
            scope = {"type": "http", "method": "POST", "headers": headers, **path}
            await server.app(scope, receive, send)
            assert statuses[0] == 400

    run(test())
