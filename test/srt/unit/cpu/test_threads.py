"""Threads on a CPU: how many, what they do with denormals, and which kernels use them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mamba_eagle.cpu import threads
from mamba_eagle.devices import choose_backend
from mamba_eagle.machine_code import numba, prange
from mamba_eagle.runner.start import default_threads, usable_cores

TINY = 1e-38  # normal; its half is not


@pytest.fixture
def counts() -> None:
    """Restores the numbers of threads."""
    before = torch.get_num_threads(), threads.num_threads()
    yield
    torch.set_num_threads(before[0])
    threads._threads = before[1]
    numba.set_num_threads(before[1])


def halves(x: np.ndarray, y: np.ndarray) -> None:
    for i in prange(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * np.float32(0.5)


def in_a_thread(function: Callable[[], None]) -> None:
    """A new thread starts workers of its own, as a runner's process does."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join()


@pytest.mark.parametrize("flush", [False, True])
def test_denormals_are_flushed_on_this_thread_and_on_all_workers(flush: bool, counts) -> None:
    x = torch.full((8, 1 << 15), TINY)  # enough for torch to share it out
    found: list[int] = []

    def run() -> None:
        torch.set_num_threads(2)
        if flush:
            threads.set_threads(2)
        by_kernel = torch.empty_like(x)
        kernel = threads.Threaded(halves)
        form = kernel.parallel if os.cpu_count() > 1 else kernel.serial
        form(x.numpy(), by_kernel.numpy())
        found.extend(int(half.count_nonzero()) for half in (x * 0.5, by_kernel))

    in_a_thread(run)
    assert found == ([0, 0] if flush else [x.numel()] * 2)
    assert int((x * 0.5).count_nonzero()) == x.numel()  # nothing changed outside of that thread


def test_one_thread_is_one_for_torch_too(counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's first call starts its pool, and raises the number of an OpenMP that both use."""
    monkeypatch.setattr(numba, "set_num_threads", lambda count: torch.set_num_threads(2))
    found: list[int] = []

    def count() -> None:  # the number belongs to the thread
        threads.set_threads(1)
        found.append(torch.get_num_threads())

    in_a_thread(count)
    assert found == [1]


def test_small_work_stays_on_one_thread(counts, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = threads.Threaded(halves)
    monkeypatch.setattr(kernel, "serial", lambda: "one")
    monkeypatch.setattr(kernel, "parallel", lambda: "several")
    small, large = threads.MIN_PARALLEL - 1, threads.MIN_PARALLEL
    monkeypatch.setattr(threads, "_threads", 1)
    assert kernel(large) == "one"
    monkeypatch.setattr(threads, "_threads", 2)
    assert (kernel(small), kernel(large)) == ("one", "several")
    with threads.parallel_forms():
        assert kernel(0) == "several"
    assert kernel(small) == "one"


@pytest.mark.parametrize(
    "cores, expected", [(1, 1), (2, 1), (4, 3), (8, 7), (16, 14), (64, 32), (128, 32)]
)
def test_default_threads(cores: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mamba_eagle.runner.start.usable_cores", lambda: cores)
    assert default_threads() == expected
    assert default_threads(2) == max(1, expected // 2)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux tells")
def test_cores_are_counted_once_and_within_the_containers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight processors, two on each core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    quota = tmp_path / "cpu.max"
    assert usable_cores(tmp_path, quota) == 8  # nothing is known of them
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    for text, expected in (("max 100000\n", 4), ("250000 100000\n", 3), ("10000 100000\n", 1)):
        quota.write_text(text)
        assert usable_cores(tmp_path, quota) == expected


def test_a_row_has_the_same_log_probabilities_alone(counts) -> None:
    """torch adds up a long row alone in parts, one per thread, and rows side by side whole."""
    torch.set_num_threads(4)
    backend = choose_backend(torch.device("cpu"), torch.float32)
    logits = 3 * torch.randn(60, 1 << 17, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(60)[:, None]
    together = backend.token_logprobs(logits, tokens, 2)
    for i in range(60):
        alone = backend.token_logprobs(logits[i : i + 1], tokens[i : i + 1], 2)
        for part, parts in zip(alone, together, strict=True):
            assert torch.equal(part, parts[i : i + 1])
