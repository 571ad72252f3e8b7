"""What the documentation names is there: tests, files behind links, headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmark/*.md", "recipes/**/*.md")
    for path in ROOT.glob(pattern)
)
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As code hosts make them of headings."""
    text = CODE_BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_there_are_pages():
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "docs/glossary.md", "docs/design/invariants.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page):
    sources = {path.name: path.read_text() for path in ROOT.glob("test/srt/**/*.py")}
    everything = "\n".join(sources.values())
    text = page.read_text()
    missing = []
    for file, _, test in re.findall(r"\b(test_\w+\.py)(::)?(\w+)?", text):
        if file not in sources:
            missing.append(file)
        elif test and not re.search(rf"^ *(def |class )?{test}\b", sources[file], re.MULTILINE):
            missing.append(f"{file}::{test}")
    for test in re.findall(r"`(?:\S*::)?(test_\w+)`", text):
        if f"def {test}(" not in everything:
            missing.append(test)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_that_a_page_names_exist(page):
    rooms = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    named = re.findall(rf"`((?:{rooms})/[\w/.-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE_BLOCK.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_table_has_a_head(page):
    """A blank line between two rows makes text of those below it."""
    lines = CODE_BLOCK.sub("", page.read_text()).split("\n")
    rows = [re.fullmatch(r" *\|.*\| *", line) is not None for line in lines]
    first = [i for i, is_row in enumerate(rows) if is_row and not (i and rows[i - 1])]
    assert [i for i in first if not re.fullmatch(r" *\|[-:| ]+\|", lines[i + 1])] == []
