"""What a folder of kernels/ holds, and who may import its naive.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mamba_eagle
from mamba_eagle import kernels

PACKAGE = Path(mamba_eagle.__file__).parent
FOLDERS = sorted(path.parent for path in Path(kernels.__file__).parent.glob("*/__init__.py"))


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


def is_naive(name: str) -> bool:
    return any(part.startswith("naive") for part in name.split("."))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_folder_has_its_naive_form(folder: Path) -> None:
    """It is plain Python and torch, and knows the other forms by their constants at most."""
    assert (folder / "naive.py").exists()
    for path in folder.glob("naive*.py"):
        for name in imported(path):
            module, _, what = name.rpartition(".")
            parts = module.split(".")
            assert "triton" not in parts and "machine_code" not in parts, name
            other_form = parts[0] == "mamba_eagle" and (parts[-1] == "torch" or parts[1] == "cpu")
            assert not other_form or what.isupper(), name


def test_production_imports_no_naive_form() -> None:
    for path in PACKAGE.rglob("*.py"):
        if not path.name.startswith("naive"):
            assert not any(map(is_naive, imported(path))), path


def test_the_rule_can_fail() -> None:
    assert any(map(is_naive, imported(PACKAGE / "kernels/gated_norm/naive.py")))
