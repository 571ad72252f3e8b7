"""Servers for chaos tests: each test file starts as few as it can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos_rig import FLAGS, SCALE, Start
from running_server import RunningServer, need_weights

from mamba_eagle.embedded import EMBEDDED_MODEL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "chaos":
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300 * SCALE))


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


@pytest.fixture(scope="session")
def plain() -> Iterator[RunningServer]:
    """One for the tests that leave a server as they found it."""
    need_weights(EMBEDDED_MODEL)
    server = RunningServer(*FLAGS, "--ready-timeout", "2")
    yield server.wait_until_ready()
    server.stop()
