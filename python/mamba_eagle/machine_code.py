"""Functions that Numba compiles to machine code: the options, and where the code is kept.

Numba compares the machine code of a function with the file that the function stands in, not with
the files of the functions that were compiled into it. After a checkout is updated, old code would
be run on data that is laid out in a new way. So there is a folder of code for each state of the
sources.

Used by the CPU engine (cpu/), and on any device by what the host computes: the n-gram drafter's
trie and the rounding of weights.
"""

import atexit
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import prange  # noqa: F401 for those whose functions are compiled here

log = logging.getLogger("mamba_eagle")

KEPT_SECONDS = 7 * 24 * 3600.0  # of folders that are no longer written to
PACKAGE = Path(__file__).parent
# all that is compiled
SOURCES = ("machine_code.py", "cpu", "drafting/ngram_trie.py", "quantization/group_rounding.py")


def cache_folder(package: Path, sources: Sequence[str], places: Sequence[Path]) -> Path | None:
    """The folder for ``sources`` of ``package``, files and folders, as they are now, in the first
    of ``places`` that can be written; None: there is none. Folders of other states go once they
    are old."""
    state = blake2b(digest_size=8)
    files = [
        path
        for source in sources
        for path in (sorted((package / source).rglob("*.py")) or [package / source])
    ]
    for path in files:
        state.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    for place in places:
        folder = place / f"numba-{state.hexdigest()}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                _forget(place, folder)
                return folder
    return None


def own_cache_folder(beside: Path = PACKAGE / "__pycache__") -> Path:
    """The package's folder: beside its sources, else in the user's cache, else in a private folder,
    of which a line in the log says what to do."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # not absolute: there is no home
    others = [users / "mamba_eagle"] if users.is_absolute() else []
    if (folder := cache_folder(PACKAGE, SOURCES, [beside, *others])) is not None:
        return folder
    private = private_folder()
    log.warning(
        "compiled kernels cannot be kept in %s: they are in %s, and where that does not stay each "
        "start takes a minute more; set XDG_CACHE_HOME or NUMBA_CACHE_DIR to a folder that stays "
        "and can be written",
        " or ".join(str(place) for place in (beside, *others)),
        private,
    )
    return cache_folder(PACKAGE, SOURCES, [private]) or private


def private_folder() -> Path:
    """A folder below the temporary one that only this user can write to, since what lies there is
    run: the same for all processes, unless another user has taken its name."""
    path = Path(tempfile.gettempdir(), f"mamba_eagle-{os.getuid()}")
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
        if is_private and found.st_uid == os.getuid():
            return path
    path = Path(tempfile.mkdtemp(prefix="mamba_eagle-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _forget(place: Path, own: Path) -> None:
    for folder in place.glob("numba-*"):
        with suppress(OSError):
            if folder != own and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


# For tests: what is outside of its array raises IndexError, or ends the process in vector code
CHECKED = os.environ.get("MAMBA_EAGLE_CHECK_BOUNDS") == "1"
if CHECKED:
    numba.config.BOUNDSCHECK = 1  # of callbacks, too
if not numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR
    numba.config.CACHE_DIR = str(own_cache_folder() / ("checked" if CHECKED else ""))

_OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": CHECKED}


def kernel(function: Callable[..., Any], parallel: bool = False) -> Callable[..., Any]:
    """Compile; sums may be evaluated in any order, so that they run in vector registers. NaN and
    infinity keep their meaning. parallel: loops over ``prange`` use threads."""
    fastmath = {"reassoc", "contract", "arcp", "nsz"}
    return numba.njit(fastmath=fastmath, parallel=parallel, **_OPTIONS)(function)


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile; operations keep the order in which they are written."""
    return numba.njit(fastmath={"contract"}, **_OPTIONS)(function)


def strictly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile; each operation is rounded as it is written, so the bits of what is computed do not
    depend on the code around it."""
    return numba.njit(**_OPTIONS)(function)


@strictly
def check_within(ids, size):  # noqa: ANN001, ANN201
    """For vector code, which takes addresses; called where kernels are CHECKED. A negative index,
    which counts from the end elsewhere, is in front of the first element there."""
    for number in ids:
        if number < 0 or number >= size:
            raise IndexError("an index of vector code is outside of its array")


# Bits of a float32 but the sign, and those of infinity: NaN is above it.
SIZE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@exactly
def ordered(bits):  # noqa: ANN001, ANN201
    """Bits of a float32 as an integer that rises with it, which vectorises; its own inverse."""
    return np.int32(bits ^ (np.int32(bits >> np.int32(31)) & SIZE))
