"""What log lines look like: text for people, or JSON for whatever collects them."""

from __future__ import annotations

import json
import logging
import time
from typing import Any


def set_up(level: str, kind: str, role: str) -> None:
    """Of the whole process. kind: --log-format. role: server, scheduler or runner."""
    handler = logging.StreamHandler()
    if kind == "json":
        handler.setFormatter(JsonFormatter(role))
    else:
        handler.setFormatter(
            logging.Formatter(f"[%(asctime)s {role}] %(levelname)s %(name)s: %(message)s")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler])


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
        """text: how the lines begin."""
        super().__init__()
        self._text = text
        self._seconds = seconds
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(self._text):
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
