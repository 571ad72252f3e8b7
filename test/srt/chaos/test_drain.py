"""A stop lets open requests finish and takes no new ones."""

from __future__ import annotations

import signal

import httpx
from chaos_rig import ENDLESS, PATIENCE, SCALE, Start, Stream, eventually, generate_body
from running_server import RunningServer, assert_all_ended

STREAMS = 20 * min(SCALE, 3)  # more would not fit into the time that they have
TOKENS = 150


def status(server: RunningServer, path: str) -> int:
    return httpx.get(server.base_url + path, timeout=PATIENCE).status_code


def test_no_open_request_is_cut_and_no_new_one_is_taken(start: Start) -> None:
    server = start("--shutdown-timeout", str(PATIENCE)).wait_until_ready()
    assert status(server, "/ready") == 200
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as kept:
        assert kept.get("/v1/models").status_code == 200
        streams = [Stream(server, generate_body(TOKENS)) for _ in range(STREAMS)]
        # One without an end, so that the server is still there to be asked.
        last = Stream(server, {**ENDLESS, "rid": "last"})
        begun = [*streams, last]
        eventually(lambda: all(stream.events for stream in begun), "every stream has begun")

        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: status(server, "/ready") == 503, "/ready is 503")
        assert status(server, "/health") == 200, "it is alive, and must not be restarted"
        for client in (kept, httpx):
            url = f"{server.base_url}/generate"
            refused = client.post(url, json=generate_body(1), timeout=PATIENCE)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
            assert "shutting down" in refused.json()["error"]["message"]
            assert refused.headers["Connection"] == "close"

    for stream in streams:
        assert stream.wait()["meta_info"]["completion_tokens"] == TOKENS
    url, body = f"{server.base_url}/abort_request", {"rid": "last"}
    assert httpx.post(url, json=body, timeout=PATIENCE).json() == {"aborted": 1}
    assert last.wait()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.wait(PATIENCE) == 0
    assert "cut off" not in server.output
    assert_all_ended(server)


def test_what_is_still_open_after_the_shutdown_timeout_gets_an_error(start: Start) -> None:
    server = start("--shutdown-timeout", "0.5").wait_until_ready()
    stream = Stream(server, ENDLESS)
    eventually(lambda: stream.events, "the stream has begun")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    error = stream.wait()["error"]
    assert error["code"] == 503 and "shutting down" in error["message"]
    assert "cut off after --shutdown-timeout 0.5: 1 open requests" in server.output
    assert_all_ended(server)
