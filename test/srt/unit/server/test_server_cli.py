"""The command line passes on what it does not know itself."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from mamba_eagle import cli
from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.message.channel import PID_FILE, new_socket_dir, remove_stale_dirs
from mamba_eagle.server.engine.launch import Ending
from mamba_eagle.server.serve import HttpLaunch


def test_commands_get_the_remaining_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Module:
        @staticmethod
        def main(argv: list[str]) -> None:
            calls.append(argv)

    names = []
    monkeypatch.setattr("sys.argv", ["cli.py"])
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: names.append(name) or Module)
    assert cli.main(["serve", "--port", "1"]) == 0
    assert cli.main(["train-drafter", "--output", "x"]) == 0
    assert names == ["mamba_eagle.launch_server", "mamba_eagle.train.command"]
    assert calls == [["--port", "1"], ["--output", "x"]]


@pytest.mark.parametrize("command", ["serve", "train-drafter"])
def test_help_names_the_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cli.py"])
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mamba-eagle {command} [-h]")


@pytest.mark.parametrize("arguments", [[], ["nope"], ["train"], ["train", "problems"]])
def test_unknown_commands_are_code_2(arguments: list[str]) -> None:
    assert cli.main(arguments) == 2


def test_train_points_to_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """It was a command once; the file that it names is in every checkout."""
    assert cli.main(["train", "pretrain"]) == 2
    said = capsys.readouterr().err
    assert "recipes/mamba2_math/README.md" in said and "train-drafter" in said
    assert (Path(__file__).parents[4] / "recipes" / "mamba2_math" / "README.md").is_file()


def test_only_folders_of_dead_servers_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids = {"dead": str(2**22 + 1), "alive": str(os.getpid()), "odd": "x"}
    for name, pid in pids.items():
        (tmp_path / f"mamba-eagle-{name}").mkdir()
        (tmp_path / f"mamba-eagle-{name}" / PID_FILE).write_text(pid)
    (tmp_path / "mamba-eagle-new").mkdir()
    remove_stale_dirs()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mamba-eagle-alive", "mamba-eagle-new", "mamba-eagle-odd"]


def test_without_a_temporary_folder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(ConfigError, match="set TMPDIR to one that can be written"):
        new_socket_dir()


# Short names, since the path of the test's own folder counts.
@pytest.mark.parametrize(
    ("name", "problem"), [("x" * 100, "107 is the"), ("\udcff", "UTF-8")], ids=["long", "bytes"]
)
def test_bad_tmpdir(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ConfigError, match=f"TMPDIR = .*{problem}"):
        new_socket_dir()
    assert list(folder.iterdir()) == []


def test_settings_that_cannot_be_written_end_the_start() -> None:
    async def test() -> Ending:
        launch = HttpLaunch(ServerConfig(), socket.socket(), "/no/such/folder", ServerConfig())
        launch.ending = asyncio.get_running_loop().create_future()
        launch.nodes = launch._make_nodes()
        launch.start_engine()
        assert launch.children == []
        return launch.ending.result()

    ending = asyncio.run(test())
    assert ending.code == 1 and "/no/such/folder: No such file" in ending.message
    assert "TMPDIR" in ending.message
