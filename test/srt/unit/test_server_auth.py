"""Who carries a key is let in; a key that is missing by mistake opens no server."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_harness import run, says, serving

from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.launch_server import main
from mamba_eagle.server.auth import KEY_VARIABLE, api_keys

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


def test_all_sources_of_keys_count(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    config = ServerConfig(api_key="flag", api_key_file=str(file))
    assert api_keys(config, {KEY_VARIABLE: " variable\n"}) == ["flag", "variable", "one", "two"]
    assert api_keys(ServerConfig(), {}) == []


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
