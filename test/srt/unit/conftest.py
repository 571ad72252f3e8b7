"""Models that the tests of several rooms run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """A small random model and its head: runner_harness.Tiny."""
    from runner_harness import write_tiny  # imports torch, which most tests here do without

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    from tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("model"))
