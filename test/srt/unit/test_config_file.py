"""--config FILE gives what flags give, and flags win."""

from __future__ import annotations

from pathlib import Path

import pytest

from mamba_eagle import launch_server
from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.config_file import with_config_file

SETTINGS = """\
port: 31000
served-model-name: yes-really
disable_radix_cache: true
speculative-adaptive: false
mem-fraction-static: 0.5
max-total-tokens: null   # auto
log-requests: false
"""


def flags(tmp_path: Path, text: str, *given: str) -> list[str]:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return with_config_file(["--config", str(path), *given], ServerConfig)


def test_settings_stand_for_flags_in_front(tmp_path: Path) -> None:
    *made, config, path, flag, port = flags(tmp_path, SETTINGS, "--port", "32000")
    assert (config, flag, port) == ("--config", "--port", "32000")
    assert made == [
        "--port=31000",
        "--served-model-name=yes-really",
        "--disable-radix-cache",
        "--no-speculative-adaptive",
        "--mem-fraction-static=0.5",
        "--max-total-tokens",
        "auto",
    ]
    assert flags(tmp_path, "")[:1] == ["--config"]
    assert with_config_file(["--port", "1"], ServerConfig) == ["--port", "1"]
    file = str(tmp_path / "server.yaml")
    (tmp_path / "server.yaml").write_text("port: 31000")
    for given in (["--conf", file], [f"--confi={file}"]):
        assert with_config_file(given, ServerConfig) == ["--port=31000", *given]


def test_texts_are_as_they_are_written(tmp_path: Path) -> None:
    text = "api-key: [0123, 1_0]\nserved-model-name: 3.10\ncors-origins: off\nlog-requests: on"
    assert flags(tmp_path, text)[:-2] == [
        "--api-key=0123",
        "--api-key=1_0",
        "--served-model-name=3.10",
        "--cors-origins=off",
        "--log-requests",
    ]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "prot: 1\nmax-total-token: 2",
            ['"prot" is not a setting; do you mean port?', "max-total"],
        ),
        ("log-requests: maybe", ["log-requests", '"maybe"', "true or false"]),
        ("port: [1, 2]", ["port", '["1", "2"]', "text or a number"]),
        ("api-key: [one, null]", ["api-key", '["one", null]', "text or a number"]),
        ("port: [1", ["is not YAML"]),
        ("just text", ["port: 30000"]),
        ("[" * 5000, ["is not YAML"]),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        flags(tmp_path, text)
    for problem in problems:
        assert problem in str(error.value)


def test_the_server_says_which_file_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_server.main(["--config", "/no/such/file"]) == 2
    assert "--config /no/such/file: No such file" in capsys.readouterr().err
