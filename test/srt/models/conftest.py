"""The runner harness of the unit tests serves here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


@pytest.fixture(scope="session")
def one_thread() -> None:
    """For many small products: threads would wait for each other."""
    torch.set_num_threads(1)
