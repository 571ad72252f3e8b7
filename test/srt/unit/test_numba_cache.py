"""Machine code of other sources is not used."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mamba_eagle.kernels.numba_cache import KEPT_SECONDS, cache_folder


def test_each_state_of_the_sources_has_a_folder(tmp_path: Path) -> None:
    sources, place = tmp_path / "kernels", tmp_path / "cache"
    (sources / "deep").mkdir(parents=True)
    (sources / "a.py").write_text("one")
    (sources / "deep" / "b.py").write_text("two")
    first = cache_folder(sources, [place])
    assert first == cache_folder(sources, [place])
    (sources / "deep" / "b.py").write_text("three")  # a callee of a.py's
    second = cache_folder(sources, [place])
    assert first != second and first is not None and first.is_dir(), "a server may still use it"
    old = time.time() - KEPT_SECONDS - 60
    os.utime(first, (old, old))
    assert cache_folder(sources, [place]) == second and not first.exists()
    (sources / "deep" / "b.py").write_text("two")
    assert cache_folder(sources, [place]) == first


def test_the_first_place_that_can_be_written_is_taken(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    taken = tmp_path / "file"
    taken.write_text("no folder can be made here")
    found = cache_folder(tmp_path / "kernels", [taken / "below", tmp_path / "cache"])
    assert found is not None and found.parent == tmp_path / "cache"
    assert cache_folder(tmp_path / "kernels", [taken / "below"]) is None
