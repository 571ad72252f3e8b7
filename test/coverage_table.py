"""Print slipcover's JSON report as one line per folder of the package: `make test` calls it.

python test/coverage_table.py .coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = Path("python/mamba_eagle")


def folder(path: str) -> str:
    """The folder of the package that a file belongs to; "." for files on its top level."""
    parts = Path(path).parts
    own = parts[parts.index(PACKAGE.name) + 1 :]
    return own[0] + "/" if len(own) > 1 else "."


def table(report: dict[str, Any]) -> str:
    """Lines that could run, and the share of them that did."""
    ran: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for path, found in report["files"].items():
        for name in (folder(path), "total"):
            ran[name] += len(found["executed_lines"])
            total[name] += len(found["executed_lines"]) + len(found["missing_lines"])
    names = [*sorted(name for name in total if name != "total"), "total"]
    rows = [f"{name:<14}{total[name]:>7}{ran[name] / max(total[name], 1):>8.0%}" for name in names]
    return "\n".join([f"{'coverage':<14}{'lines':>7}{'run':>8}", *rows])


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
