"""What log lines look like: text for people, or JSON for whatever collects them."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TextIO

log = logging.getLogger("mamba_eagle")
PROGRESS_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")  # a bar would break lines


def set_up(level: str, kind: str, role: str) -> None:
    """For the whole process. kind: --log-format. role: server, scheduler or runner."""
    handler = logging.StreamHandler()
    if kind == "json":
        handler.setFormatter(JsonFormatter(role))
        _bring_in_the_rest()
    else:
        handler.setFormatter(
            logging.Formatter(f"[%(asctime)s {role}] %(levelname)s %(name)s: %(message)s")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":
        logging.getLogger("torch").setLevel(logging.WARNING)  # it reports on its caches as it exits


def _bring_in_the_rest() -> None:
    """Warnings and what ends a thread or the process become lines of the log as well."""
    os.environ.update(dict.fromkeys(PROGRESS_BARS, "1"))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value, args.exc_traceback
    )


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    log.critical("uncaught: %s", error, exc_info=(kind, error or kind(), trace))


def are_json() -> bool:
    return any(isinstance(one.formatter, JsonFormatter) for one in logging.getLogger().handlers)


def _write(stream: TextIO | None, text: str) -> None:
    """A server goes on when the reader of its output has gone, as ``| head`` has."""
    with contextlib.suppress(OSError):
        print(text, end="", file=stream, flush=True)


def say(line: str) -> None:
    """Something that every operator is to read: on standard output, or in a log of JSON."""
    if are_json():
        log.info(line)
    else:
        _write(sys.stdout, line + "\n")


def complain(line: str) -> None:
    """Why nothing works: on standard error, or in a log of JSON."""
    if are_json():
        log.error(line)
    else:
        _write(sys.stderr, line + "\n")


def pass_on(role: str, text: str, lines: Iterable[str]) -> None:
    """Writes what a process of this role has written: ``text`` as it came, with progress bars, or
    in a log of JSON the ``lines`` that are complete. A C library or a crash knows nothing of
    logging: what is not JSON becomes a message."""
    if not are_json():
        _write(sys.stderr, text)
        return
    for line in filter(str.strip, lines):
        if line.startswith("{"):
            _write(sys.stderr, line + "\n")
        else:
            log.getChild(role).warning(line)


class JsonFormatter(logging.Formatter):
    """One object per line. ``extra={"fields": {...}}`` of a log call adds its own keys."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self.role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: no character can end the line


class Rarely(logging.Filter):
    """Lets a line that clients can cause pass once in a while."""

    def __init__(self, text: str, seconds: float) -> None:
        """text: how the lines begin, before their arguments are in them."""
        super().__init__()
        self._text = text
        self._seconds = seconds
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(self._text):
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
