"""Samples of processes' memory, and the growth that they show."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmark.lib.memory import MemoryWatch, Sample, resident_mb


def test_memory_that_a_process_takes_is_seen() -> None:
    held = "import sys; held = bytearray(b'x') * 200_000_000; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 190 < resident_mb(child.pid) < 400
        child.kill()


def test_growth_is_from_the_first_sample_after_the_early_time() -> None:
    watch = MemoryWatch({"runner": os.getpid()})
    watch.samples = [Sample(t, {"runner": mb}) for t, mb in ((0, 50), (299, 90), (304, 100))]
    watch.samples.append(Sample(900, {"runner": 104}))
    grown = watch.growth()["runner"]
    assert (grown.early_s, grown.early_mb, grown.end_mb) == (304, 100, 104)
    assert grown.ratio == pytest.approx(1.04)


def test_there_are_a_first_and_a_last_sample() -> None:
    with MemoryWatch({"self": os.getpid()}, pause=1000) as watch:
        pass
    assert len(watch.samples) == 2
    assert watch.growth()["self"].ratio == 1
