"""The runner harness of the unit tests serves here too."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def one_thread() -> None:
    """For many small products: threads would wait for each other."""
    torch.set_num_threads(1)
