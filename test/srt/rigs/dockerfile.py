"""What an image would have, read from its Dockerfile without a daemon.

Knows what ours says: FROM, COPY, RUN, ARG, WORKDIR, USER, EXPOSE, HEALTHCHECK and ENTRYPOINT. What
RUN does is left to the test.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Instruction(NamedTuple):
    """``COPY a b``: name COPY, arguments "a b"."""

    name: str
    arguments: str

    @property
    def command(self) -> list[str]:
        """Of the form in JSON, behind what options there are."""
        parts: list[str] = json.loads(self.arguments[self.arguments.index("[") :])
        return parts


def read_dockerfile(path: Path) -> list[Instruction]:
    """Comments are dropped, lines that go on are joined."""
    lines = [line for line in path.read_text().splitlines() if not re.match(r"\s*#", line)]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [Instruction(name.upper(), rest) for name, rest in parts]


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Whether a build does not see a file. The last pattern that fits it or a folder of it counts.

    name: from the context's folder.
    """
    ignored = False
    path = PurePosixPath(name)
    names = [str(path), *map(str, path.parents[:-1])]
    for pattern in patterns:
        bare = pattern.lstrip("!").strip("/")
        forms = [bare, bare.removeprefix("**/")]
        # A star is no folder's end: "*" is each entry of the context, and all that is below them.
        fits = any(
            fnmatch.fnmatchcase(one, form)
            and (form != bare or one.count("/") <= bare.count("/"))
            or bare.startswith("**/")
            and fnmatch.fnmatchcase(PurePosixPath(one).name, forms[1])
            for one in names
            for form in forms
        )
        if fits:
            ignored = not pattern.startswith("!")
    return ignored


def copy_context(context: Path, instructions: list[Instruction], ignore: Path, root: Path) -> None:
    """Does what COPY says, into ``root`` as the image's root folder.

    Raises: FileNotFoundError for a source that a build would not see.
    """
    patterns = ignore.read_text().split()
    folder = PurePosixPath("/")
    for name, arguments in instructions:
        if name == "WORKDIR":
            folder /= arguments
        if name != "COPY":
            continue
        *sources, target = arguments.split()
        place = root / str(folder / target).lstrip("/")
        for source in sources:
            copied = _copy(context, source, patterns, place, target.endswith("/"))
            if not copied:
                raise FileNotFoundError(f"COPY {arguments}: {source} is missing or ignored")


def _copy(context: Path, source: str, patterns: list[str], place: Path, into: bool) -> int:
    """How many files were copied: a folder's contents, or a file."""
    start = context / source
    if start.is_file():
        if is_ignored(source, patterns):
            return 0
        target = place / start.name if into else place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(start, target)
        return 1
    count = 0
    for folder, _, files in os.walk(start):
        for file in (Path(folder) / name for name in files):
            if not is_ignored(file.relative_to(context).as_posix(), patterns):
                target = place / file.relative_to(start)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
                count += 1
    return count
