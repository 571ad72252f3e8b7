"""Markers and limits for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def denormals_as_they_are() -> Iterator[None]:
    """A runner in this process makes its thread flush them, and so every later test."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in gpu_tests:
            item.add_marker(skip)
