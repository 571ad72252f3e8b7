"""What naive/ holds, and what its files may import."""

from __future__ import annotations

import ast
from pathlib import Path

import naive
import pytest

from mamba_eagle import kernels

FOLDERS = sorted(path.parent.name for path in Path(kernels.__file__).parent.glob("*/__init__.py"))
FILES = sorted(Path(naive.__file__).parent.glob("[!_]*.py"))


def imported(path: Path) -> set[str]:
    """All modules, and all names in them, that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_other_form(name: str) -> bool:
    """Constants of another form may be imported."""
    module, _, what = name.rpartition(".")
    parts = module.split(".")
    if "triton" in parts or "machine_code" in parts:
        return True
    own = parts[0] == "mamba_eagle" and (parts[-1] == "torch" or parts[1] == "cpu")
    return own and not what.isupper()


def test_every_operation_has_its_naive_form() -> None:
    assert set(FOLDERS) <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_naive_forms_know_no_other_one(path: Path) -> None:
    """They are plain Python and torch."""
    assert not any(map(is_other_form, imported(path)))


def test_the_rule_can_fail() -> None:
    assert any(map(is_other_form, imported(Path(kernels.__file__).parent / "ssd/triton.py")))
