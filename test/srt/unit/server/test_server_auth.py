"""Who carries a key is let in; a key that is missing by mistake opens no server."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pytest
from server_harness import run, says, serving

from mamba_eagle.config import ConfigError, ServerConfig, add_arguments, from_arguments
from mamba_eagle.config_file import with_config_file
from mamba_eagle.launch_server import main
from mamba_eagle.message import Profile
from mamba_eagle.server.http.auth import KEY_VARIABLE, api_keys

KEY = "schlüssel-1"
GOOD = [
    {"Authorization": f"Bearer {KEY}".encode()},
    {"authorization": f"bearer   {KEY} ".encode()},
    {"Authorization": f"BEARER {KEY}".encode("latin-1")},
    {"X-API-Key": KEY.encode()},
    {"x-api-key": b"second"},
    {"x-api-key": b"wrong", "Authorization": b"Bearer second"},
]
BAD = [
    {},
    {"Authorization": KEY.encode()},
    {"Authorization": b"Basic " + KEY.encode()},
    {"Authorization": b"Bearer"},
    {"Authorization": b"Bearer " + KEY.encode() + b"x"},
    {"x-api-key": b""},
    {"x-api-key": KEY.encode()[:-1]},
]


def test_keys_come_in_several_headers(tmp_path: Path) -> None:
    second = tmp_path / "keys"
    second.write_text("second")

    async def test() -> None:
        async with serving(says("x"), api_key=KEY, api_key_file=str(second)) as server:
            for headers in GOOD:
                reply = await server.client.get("/v1/models", headers=headers)
                assert reply.status_code == 200, headers
            for headers in BAD:
                reply = await server.client.get("/v1/models", headers=headers)
                assert reply.status_code == 401, headers
                assert "x-api-key" in reply.json()["error"]["message"]
            for path in ("/", "/health", "/health/"):
                assert (await server.client.get(path)).status_code == 200

    run(test())


def test_two_headers_of_a_name_are_refused_whichever_is_right() -> None:
    async def test() -> None:
        async with serving(says("x"), api_key="right", admin_api_key="admin") as server:
            for name, right in (("Authorization", "Bearer right"), ("X-API-Key", "right")):
                for pair in ([right, "wrong"], ["wrong", right], [right, right]):
                    headers = [(name, value) for value in pair]
                    for path in ("/v1/models", "/flush_cache"):
                        reply = await server.client.get(path, headers=headers)
                        assert reply.status_code == 400, (path, headers)
                        message = reply.json()["error"]["message"]
                        assert f"{name.lower()} came 2 times" in message

    run(test())


def test_all_sources_of_keys_count(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    config = ServerConfig(api_key="flag", api_key_file=str(file))
    assert api_keys(config, {KEY_VARIABLE: " variable\n"}) == ["flag", "variable", "one", "two"]
    assert api_keys(ServerConfig(), {}) == []
    assert api_keys(ServerConfig(api_key=("a", "b")), {}) == ["a", "b"]


def test_a_key_may_be_given_several_times(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServerConfig)
    file = tmp_path / "settings.yaml"
    file.write_text("api-key: [a, b]\n")
    arguments = with_config_file(["--config", str(file), "--api-key", "c"], ServerConfig)
    parser.add_argument("--config")
    config = from_arguments(ServerConfig, parser.parse_args(arguments))
    assert config.api_key == ("a", "b", "c") and api_keys(config, {}) == ["a", "b", "c"]
    one = from_arguments(ServerConfig, parser.parse_args(["--api-key", "c"]))
    assert api_keys(one, {}) == ["c"]
    assert api_keys(from_arguments(ServerConfig, parser.parse_args([])), {}) == []


ADMIN: list[tuple[str, str, Any]] = [
    ("POST", "/flush_cache", None),
    ("GET", "/flush_cache", None),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/abort_requests", {"request_ids": ["x"]}),
    ("GET", "/cache?text=1", None),
    ("POST", "/start_profile", {"num_steps": 5}),
    ("POST", "/stop_profile", None),
]
ALWAYS = ("/cache?text=1", "/start_profile", "/stop_profile")  # by no other key


def test_what_changes_the_server_for_all_takes_the_admin_key() -> None:
    async def test() -> None:
        keys = {"api_key": ("one", "two"), "admin_api_key": "operator"}
        async with serving(says("x"), **keys) as server:
            for method, path, body in ADMIN:
                for key, status in (("one", 401), ("two", 401), ("operator", 200)):
                    reply = await server.client.request(
                        method, path, json=body, headers={"x-api-key": key}
                    )
                    assert reply.status_code == status, (path, key, reply.text)
                    assert status == 200 or "--admin-api-key" in reply.text
            # one's own request is everybody's to end
            for key in ("one", "two", "operator"):
                reply = await server.client.post(
                    "/abort_request", json={"rid": "x"}, headers={"x-api-key": key}
                )
                assert reply.status_code == 200
            shown = await server.client.get("/server_info", headers={"x-api-key": "two"})
            assert shown.json()["api_key"] == shown.json()["admin_api_key"] == "***"
        async with serving(says("x")) as server:  # nobody was set apart
            for method, path, body in ADMIN:
                reply = await server.client.request(method, path, json=body)
                assert reply.status_code == (403 if path in ALWAYS else 200), reply.text

    run(test())


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe", None])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        api_keys(ServerConfig(api_key_file=str(file)), {})


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_key_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="set but empty"):
        api_keys(ServerConfig(), {KEY_VARIABLE: value})
    with pytest.raises(ConfigError, match="UTF-8"):
        api_keys(ServerConfig(), {KEY_VARIABLE: value + "\udcff"})
    for flag in ("--api-key", "--api-key-file"):
        with pytest.raises(SystemExit) as ended:
            main([flag, value])
        assert ended.value.code == 2
        assert f"argument {flag}: is empty" in capsys.readouterr().err


def test_no_key_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "hidden-in-environment")
    file = tmp_path / "keys"
    file.write_text("hidden-in-file")

    async def test() -> None:
        async with serving(says("x"), api_key="hidden-in-flag", api_key_file=str(file)) as server:
            for key in ("hidden-in-environment", "hidden-in-file", "hidden-in-flag"):
                reply = await server.client.get("/server_info", headers={"x-api-key": key})
                assert reply.status_code == 200 and "hidden-in" not in reply.text
                assert reply.json()["api_key"] == "***"

    run(test())


def test_a_profile_is_asked_for_by_the_operator() -> None:
    async def test() -> None:
        async with serving(says("x"), admin_api_key="operator") as server:
            server.client.headers["x-api-key"] = "operator"
            reply = await server.post("/stop_profile")
            assert reply.status_code == 400 and "nothing is being recorded" in reply.text
            for body, part in (
                ({"num_steps": 0}, "num_steps = 0"),
                ({"num_steps": 201}, "200"),
                ({"num_steps": "x"}, "integer"),
                ({"output_dir": "/etc"}, "output_dir"),
            ):
                reply = await server.post("/start_profile", **body)
                assert reply.status_code == 400 and part in reply.text
            assert server.engine.of(Profile)[1:] == []
            started = (await server.post("/start_profile", num_steps=5)).json()
            (asked,) = server.engine.of(Profile)[1:]
            assert asked.steps == 5 and started["path"] == asked.path
            assert asked.path.startswith(tempfile.gettempdir())
            ended = (await server.post("/stop_profile")).json()
            assert ended["path"] == asked.path

    run(test())
