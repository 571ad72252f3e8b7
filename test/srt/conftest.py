"""Markers and limits for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Set before torch is imported. The models in tests are small: more threads would only make the
# test process, the server it starts and pytest's neighbours wait for each other.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Where more threads are asked for: sleep at barriers, do not spin (see bench_one_batch.main).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# No test may look for a model or a tokenizer on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SERVERS = ("test/srt/chaos/", "test/srt/e2e/")

if find_spec("hypothesis"):  # on a machine for the tests of kernels it may be missing
    from hypothesis import HealthCheck, settings

    # The same examples each time, as all that is random here has a seed; none is too slow, since
    # the machine may be busy. With MAMBA_EAGLE_CHAOS_SCALE above 1 it looks for others.
    settings.register_profile(
        "tests",
        deadline=None,
        derandomize=int(os.environ.get("MAMBA_EAGLE_CHAOS_SCALE", "1")) == 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("tests")


if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import make_quicker

    make_quicker()


@pytest.fixture(autouse=True)
def denormals_as_they_are() -> Iterator[None]:
    """A runner in this process makes its thread flush them, and so every later test."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`make test` has two workers. A file's tests stay in one, and those that start servers, which
    have several processes each, in the first; the files come in their order."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith(SERVERS) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path != frozen_for[0]:  # what the first tests of all loaded is half of all objects
        frozen_for[0] = item.path
        freeze()
    if "torch" in sys.modules:  # what a test draws does not depend on those before it
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # After those with servers come Triton's kernels, which need no Numba: the first server compiles
    # meanwhile what others find in the cache.
    triton = {item.path for item in items if item.name == "test_in_the_interpreter"}
    items.sort(key=lambda item: (not item.nodeid.startswith(SERVERS), item.path not in triton))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in gpu_tests:
            item.add_marker(skip)


def freeze() -> None:
    """Else each full collection, of which some tests ask for many, walks through all modules and
    tests: half a second."""
    gc.collect()
    gc.freeze()


frozen_for: list[Path | None] = [None]  # the file


def pytest_collection_finish() -> None:
    freeze()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal: a shell starts what is in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
