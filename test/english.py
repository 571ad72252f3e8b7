"""Words that this project's English does without: ``python test/english.py`` names where they are.

Reads comments and texts of Python files (docstrings, messages), and docs.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTEAD = {
    r"\bso many\b(?! that)": "this many, or the number's name",
    r"\bnobody\b": "no one, or a sentence about what happens",
    r"\bwhoever\b": "who it is: the client, the caller, the operator",
    r"(?<!\bthere)(?<!\bthat)(?<!\bwhich) is no (?!longer|more|less|reason|matter)": "is not a",
    r"\b(is|are|was|were|be|been|being) told\b": "gets, learns, is given, knows",
    r"\bas far as\b": "that, where, up to, or a sentence of its own",
    r"\b(right|directly|comes|come|stands|stand|directly) behind\b": "after",
}
KINDS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what is written for people; runs of comments are one text."""
    if path.suffix == ".md":
        yield 1, path.read_text()
        return
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type in KINDS]
    at, run = 0, ""
    for token in tokens:
        if token.type == tokenize.COMMENT and token.start[0] == at + run.count("\n") + 1:
            run += "\n" + token.string.lstrip("# ")
            continue
        yield at, run
        at, run = token.start[0], token.string
    yield at, run


def findings(path: Path) -> Iterator[str]:
    for line, text in texts(path):
        flat = re.sub(r"\n *", lambda found: "\n", text)
        for words, instead in INSTEAD.items():
            for found in re.finditer(words.replace(" ", r"\s+"), flat, re.IGNORECASE):
                where = f"{path.relative_to(ROOT)}:{line + flat.count(chr(10), 0, found.start())}"
                yield f"{where}: {' '.join(found[0].split())!r}: write {instead}"


def main() -> int:
    package = ROOT / "python" / "mamba_eagle"
    files = [*package.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    wrong = [line for path in sorted(files) for line in findings(path)]
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
