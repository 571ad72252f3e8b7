"""With --log-format json every line is JSON, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, threading, warnings
from mamba_eagle import logs
logs.set_up("info", "json", "server")
logging.getLogger("uvicorn.error").info("of uvicorn")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
logs.say("for every operator")
logs.pass_on("runner", "", ['{"message": "of a child"}', "Fatal Python error: Aborted", " ", ""])
raise OSError("the end\\nof all")
"""


def lines_of(*command: str) -> list[dict[str, str]]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.stdout == ""
    return [json.loads(line) for line in ran.stderr.splitlines()]


def test_whoever_writes_a_line_it_is_json() -> None:
    lines = lines_of(sys.executable, "-c", PROGRAM)
    messages = [line["message"] for line in lines]
    assert messages[0] == "of uvicorn" and "UserWarning: a warning" in messages[1]
    assert (
        messages[2] == "uncaught: division by zero" and "ZeroDivisionError" in lines[2]["exception"]
    )
    assert messages[3:6] == ["for every operator", "of a child", "Fatal Python error: Aborted"]
    assert lines[5]["logger"] == "mamba_eagle.runner"
    assert messages[6:] == ["uncaught: the end\nof all"]


def test_what_is_wrong_with_the_settings_is_json() -> None:
    command = [sys.executable, "-m", "mamba_eagle.launch_server", "--log-format", "json"]
    (line,) = lines_of(*command, "--model-path", "/no/such/folder")
    assert line["level"] == "error" and line["message"].startswith("--model-path /no/such/folder")


def test_a_server_goes_on_when_no_one_reads_what_it_says() -> None:
    program = "from mamba_eagle import logs; logs.say('a'); logs.say('b'); import os; os._exit(7)"
    ran = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert ran.stdout is not None
    ran.stdout.close()
    assert ran.wait(100) == 7


def test_no_socket_takes_the_number_of_a_closed_stream() -> None:
    """libuv aborts when it closes such a socket."""
    code = "import os; from mamba_eagle import launch_server as it; it.main(['--config', '/no']); "
    code += "print([os.readlink(f'/proc/self/fd/{n}') for n in range(3)], file=open(9, 'w'))"
    command = ["sh", "-c", 'exec 9>&1; exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said == f"{['/dev/null'] * 3}\n"
