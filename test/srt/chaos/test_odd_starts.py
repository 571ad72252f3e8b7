"""A server that cannot work says so in a line that names the setting, and nothing starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from chaos_rig import PATIENCE, Start
from running_server import RunningServer

from mamba_eagle.embedded import EMBEDDED_MODEL

# flag, its value, what is said of it
WRONG = [
    ("--max-running-requests", "0", "must be"),
    ("--stream-interval", "0", "must be"),
    ("--port", "99999", "must be"),
    ("--cpu-threads", "100000", "must be"),
    ("--context-length", "1", "must be 2 or more"),
    ("--max-connections", "0", "must be 1 or more"),
    ("--header-timeout", "0", "must be more than 0 seconds"),
    ("--body-timeout", "nan", "must be more than 0 seconds"),
    ("--write-timeout", "inf", "must be more than 0 seconds"),
    ("--shutdown-timeout", "-1", "must be 0 seconds or more"),
    ("--watchdog-timeout", "0.5", "must be 2 seconds or more"),
    ("--cors-origins", "example.com", "must be auto, off, * or origins"),
    ("--model-path", f"/{'x' * 300}", "File name too long"),
    ("--tokenizer-path", "~no-such-user/model", "home directory"),
    ("--constrained-json-whitespace-pattern", "[ ", "unclosed character class"),
]


def assert_refused(server: RunningServer) -> list[str]:
    """The lines it wrote."""
    assert server.wait(PATIENCE) == 2
    assert "Traceback" not in server.output
    assert server.pids() == {} and server.leftovers() == []
    return server.output.splitlines()


def test_every_setting_that_cannot_work_is_named(start: Start) -> None:
    lines = assert_refused(start(*(part for flag, value, _ in WRONG for part in (flag, value))))
    for flag, value, said in WRONG:
        assert any(
            line.startswith(f"{flag} ") and value in line and said in line for line in lines
        ), (flag, lines)


def test_any_page_may_use_a_server_on_the_network_only_with_a_key(start: Start) -> None:
    lines = assert_refused(start("--host", "192.0.2.1", "--cors-origins", "*"))
    assert any("--cors-origins '*' with --host 192.0.2.1" in line for line in lines)


def test_too_few_descriptors_are_named(start: Start) -> None:
    lines = assert_refused(start(max_files=20))
    assert any(line.startswith("ulimit -n 20: the server needs") for line in lines)


def test_a_stop_token_of_the_wrong_type_is_named(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    server = start("--model-path", str(folder))
    assert server.wait(PATIENCE) == 2
    wrong = 'generation_config.json: eos_token_id = "</s>"'
    (named,) = (line for line in server.output.splitlines() if wrong in line)
    assert named.startswith("error: ") and "Traceback" not in server.output
