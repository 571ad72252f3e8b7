"""Servers for chaos tests: each test file starts as few as it can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos_rig import FLAGS, Start
from running_server import RunningServer, need_weights

from mamba_eagle.embedded import EMBEDDED_MODEL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "chaos":
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """``start(*flags)`` gives a server, not waited for. All are stopped after the file's tests."""
    need_weights(EMBEDDED_MODEL)
    started: list[RunningServer] = []

    def start(*flags: str, max_files: int = 0) -> RunningServer:
        started.append(RunningServer(*FLAGS, *flags, max_files=max_files))
        return started[-1]

    yield start
    for server in started:
        server.stop()
