"""What bash completes, as it does it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mamba_eagle import cli, completion


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        completion.main(["bash"])
    return path


def completed(script: Path, *words: str) -> list[str]:
    """words: of the line; the last is the one that is being written."""
    if not shutil.which("bash"):
        pytest.skip("no bash")
    line = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mamba_eagle'
    line += '; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "--norc", "-c", line, "bash", str(script), "mamba-eagle", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent)
    return ran.stdout.split()


def test_commands_flags_and_values_are_completed(script: Path) -> None:
    assert completed(script, "") == list(cli.COMMANDS)
    assert completed(script, "ev") == ["eval"]
    assert completed(script, "serve", "--api-k") == ["--api-key", "--api-key-file"]
    assert completed(script, "serve", "--speculative-algorithm", "NG") == ["NGRAM"]
    assert "--no-speculative-adaptive" in completed(script, "serve", "--port", "1", "--no-spec")
    assert completed(script, "eval", "--num-q") == ["--num-questions"]
    assert completed(script, "completion", "") == ["bash", "zsh"]
    assert completed(script, "serve", "--model-path", "scr") == ["script"]  # a file
