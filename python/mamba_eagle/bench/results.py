"""Files of results: one JSON object per line. All benchmarks write and read them here."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def append(path: str | Path, lines: Iterable[Line], mode: str = "a") -> None:
    """Writes behind what the file holds; makes it and its folder where they are missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write(path: str | Path, lines: Iterable[Line]) -> None:
    """As ``append``, in place of what the file holds."""
    append(path, lines, "w")  # /dev/stdout stays


def read(path: str | Path) -> list[Line]:
    """All lines, in the order they were written."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]
