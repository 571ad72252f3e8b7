"""Keeps torch out of a process that computes nothing.

transformers imports torch wherever it finds it, though tokenizers do without: a second of processor
time and 130 MB for nothing.
"""

import os
import sys
from typing import Any

_modules: dict[str, Any] = sys.modules


def hide_torch() -> None:
    """From now on nothing finds torch, unless it is loaded already. Only for a process that is this
    program's own: code that looked for torch meanwhile will not look again."""
    if "torch" not in _modules:
        _modules["torch"] = None  # which makes imports fail, and find_spec find nothing
        # transformers would say that torch is missing
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def show_torch() -> None:
    """Takes ``hide_torch`` back."""
    if "torch" in _modules and _modules["torch"] is None:
        del _modules["torch"]
