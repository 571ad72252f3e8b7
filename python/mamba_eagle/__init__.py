"""mamba-eagle: fast, exact inference of Mamba2 and Mamba2/attention hybrid models."""

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["Engine", "EngineError", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: it takes a second, which --help and the processes do without.
    if name in ("Engine", "EngineError"):
        return getattr(importlib.import_module("mamba_eagle.engine"), name)
    raise AttributeError(f"module 'mamba_eagle' has no attribute {name!r}")
