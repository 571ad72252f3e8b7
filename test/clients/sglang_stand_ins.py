"""Runs a module of sglang where packages for GPUs are missing:

    python sglang_stand_ins.py sglang.bench_serving --backend sglang …

Its clients import parts of its engine, whose imports want such packages but which they do not call.
Those get modules here that have every name and do nothing.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PACKAGES = ("sglang.srt.multimodal", "sglang.srt.disaggregation.utils")


class StandIn(ModuleType):
    """Any name is in it."""

    FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # the one value that a client takes of a module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class StandIns(MetaPathFinder, Loader):
    """Finds them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in PACKAGES):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main(argv: Sequence[str]) -> None:
    sys.meta_path.insert(0, StandIns())
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
