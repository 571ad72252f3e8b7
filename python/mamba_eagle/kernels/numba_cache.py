"""Where Numba keeps machine code: a folder for each state of the kernels' sources.

Numba compares the machine code of a function with the file that the function stands in, not with
the files of the functions that were compiled into it. In a checkout that was updated, code of
before would go on with data that is laid out as after.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

KEPT_SECONDS = 7 * 24 * 3600.0  # of folders that nobody has written to


def cache_folder(sources: Path, places: list[Path]) -> Path | None:
    """The folder for all Python files under ``sources`` as they are now, in the first of ``places``
    that can be written; None: there is none. Folders of other states go once they are old."""
    state = blake2b(digest_size=8)
    for path in sorted(sources.rglob("*.py")):
        state.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    for place in places:
        folder = place / f"numba-{state.hexdigest()}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                _forget(place, folder)
                return folder
    return None


def own_cache_folder() -> Path | None:
    """That of this package: beside its sources, or else in the user's cache."""
    sources = Path(__file__).parent
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # not absolute: there is no home
    others = [users / "mamba_eagle"] if users.is_absolute() else []
    return cache_folder(sources, [sources / "__pycache__", *others])


def _forget(place: Path, own: Path) -> None:
    for folder in place.glob("numba-*"):
        with suppress(OSError):
            if folder != own and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
