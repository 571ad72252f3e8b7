"""Machine code of other sources is not used."""

from __future__ import annotations

import os
import re
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

from mamba_eagle.compile_progress import PROGRESS
from mamba_eagle.machine_code import (
    KEPT_SECONDS,
    PACKAGE,
    SOURCES,
    cache_folder,
    numba,
    own_cache_folder,
)


def test_each_state_of_the_sources_has_a_folder(tmp_path: Path) -> None:
    sources, place, names = tmp_path / "cpu", tmp_path / "cache", ("cpu", "trie.py")
    (tmp_path / "trie.py").write_text("zero")
    (sources / "deep").mkdir(parents=True)
    (sources / "a.py").write_text("one")
    (sources / "deep" / "b.py").write_text("two")
    first = cache_folder(tmp_path, names, [place])
    assert first == cache_folder(tmp_path, names, [place])
    (sources / "deep" / "b.py").write_text("three")  # a callee of a.py's
    second = cache_folder(tmp_path, names, [place])
    assert first != second and first is not None and first.is_dir(), "a server may still use it"
    old = time.time() - KEPT_SECONDS - 60
    os.utime(first, (old, old))
    assert cache_folder(tmp_path, names, [place]) == second and not first.exists()
    (sources / "deep" / "b.py").write_text("two")
    assert cache_folder(tmp_path, names, [place]) == first


def test_the_first_place_that_can_be_written_is_taken(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder can be made here")
    found = cache_folder(tmp_path, [], [taken / "below", tmp_path / "cache"])
    assert found is not None and found.parent == tmp_path / "cache"
    assert cache_folder(tmp_path, [], [taken / "below"]) is None


def test_every_file_that_is_compiled_counts() -> None:
    """Numba's decorators are used in no file that the folder's name does not depend on."""
    counted = {PACKAGE / each for each in SOURCES}
    counted |= {path for each in SOURCES for path in (PACKAGE / each).rglob("*.py")}
    using = {
        path for path in PACKAGE.rglob("*.py") if "mamba_eagle.machine_code" in path.read_text()
    }
    assert using and using <= counted


def test_what_is_compiled_is_not_counted_by_slipcover() -> None:
    """Numba cannot compile a function that slipcover has put its counters into."""
    settings = (PACKAGE.parents[1] / "pyproject.toml").read_text()
    omitted = re.search(r'^omit = "(.*)"$', settings, re.MULTILINE)
    assert omitted is not None
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"numba\.n?jit|numba\.c?func|machine_code import", path.read_text()):
            assert any(fnmatch(str(path), each) for each in omitted[1].split(",")), path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder; the user's cache cannot be written, nor what is below ``taken``."""
    (tmp_path / "taken").write_text("no folder can be made below")
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


def test_without_a_cache_machine_code_stays_in_a_private_folder_and_a_line_says_so(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = own_cache_folder(temporary.parent / "taken" / "below")
    assert folder.parent.parent == temporary
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert own_cache_folder(temporary.parent / "taken" / "below") == folder
    assert "XDG_CACHE_HOME or NUMBA_CACHE_DIR" in caplog.text and str(folder.parent) in caplog.text


def test_a_folder_that_others_can_write_to_is_not_used(temporary: Path) -> None:
    (folder := temporary / f"mamba_eagle-{os.getuid()}").mkdir()
    folder.chmod(0o777)
    own = own_cache_folder(temporary.parent / "taken" / "below")
    assert own.parent.parent == temporary and own.parent != folder
    assert own.parent.stat().st_mode & 0o777 == 0o700


def test_a_start_says_what_it_compiles_and_a_server_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")

    def said() -> list[str]:
        """Not by the runners of other tests, which take kernels as compiled for them."""
        records = [record for record in caplog.records if record.name == "mamba_eagle"]
        return [record.getMessage() for record in records]

    for name, value in (("SECONDS", 0.0), ("_serving", 0), ("_began", None)):
        monkeypatch.setattr(PROGRESS, name, value)
    numba.njit(lambda x: x + 1)(1)
    monkeypatch.setattr(PROGRESS, "what", "the model's step, kernel 2 of 9")
    numba.njit(lambda x: x + 2)(1)
    PROGRESS.begin_serving()
    begin, *between, end = said()
    assert "for later starts" in begin and "compiled in" in end
    assert any("the model's step, kernel 2 of 9" in line for line in between)
    numba.njit(lambda x: x + 3)(1)
    assert said()[-1] == end
