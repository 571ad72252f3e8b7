"""The HTTP process's loop is uvloop's if there is one, and asyncio's if not."""

from __future__ import annotations

import asyncio
import sys

import pytest

from mamba_eagle.server.http.listener import run


async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_without_uvloop_it_is_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(loop_module()).startswith("asyncio")


def test_with_uvloop_it_is_uvloops() -> None:
    pytest.importorskip("uvloop", reason="uvloop is not made for this system")
    assert run(loop_module()).startswith("uvloop")
