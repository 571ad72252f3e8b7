"""The page's files as the server gives them; what a visitor sees is in e2e/test_page.py."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import tomllib
from server_harness import run, serving, silent

from mamba_eagle.server.page.files import FILES, FOLDER

ROOT = Path(__file__).parents[4]
REFERENCE = re.compile(r"""(?:src|href)="(page/[^"]+)"|(?:from |import\()"\./([^"]+)\"""")


def test_all_files_come_without_a_key_and_with_their_type() -> None:
    async def test() -> None:
        async with serving(silent, api_key="secret") as server:
            for address in FILES:
                reply = await server.client.get(address)
                assert reply.status_code == 200, address
                kind = {"css": "text/css", "js": "text/javascript", "mjs": "text/javascript"}.get(
                    address.rpartition(".")[2], "text/html"
                )
                assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
                policy = reply.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; script-src 'self';")
                assert "unsafe" not in policy and "http" not in policy
            for address in ("/page", "/page/files.py", "/page/../app.py", "/page/%2e%2e/app.py"):
                assert (await server.client.get(address)).status_code == 401, address

    run(test())


def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async def test() -> None:
        async with serving(silent) as server:
            first = await server.client.get("/page/main.js")
            assert first.headers["cache-control"] == "no-cache"  # asked for each time
            known = {"If-None-Match": f'"other", {first.headers["etag"]}'}
            again = await server.client.get("/page/main.js", headers=known)
            assert (again.status_code, again.content) == (304, b"")
            changed = await server.client.get("/page/main.js", headers={"If-None-Match": '"x"'})
            assert changed.content == first.content

    run(test())


def test_below_a_path_the_page_finds_its_files() -> None:
    async def test() -> None:
        async with serving(silent, root_path="/llm") as server:
            for address in ("/llm", "/llm/", "/"):
                assert '<base href="/llm/">' in (await server.client.get(address)).text
            assert (await server.client.get("/llm/page/main.js")).status_code == 200
        async with serving(silent) as server:
            assert '<base href="./">' in (await server.client.get("/")).text

    run(test())


def test_every_file_that_is_named_is_there_and_in_the_package() -> None:
    page = FOLDER / "page.html"
    named = set()
    for path in (page, *FOLDER.glob("*.js")):
        for whole, part in REFERENCE.findall(path.read_text()):
            named.add(f"/{whole}" if whole else f"/page/{part}")
    assert named == set(FILES) - {"/"}
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = package["package-data"]["mamba_eagle"]
    for path in filter(Path.is_file, FOLDER.rglob("*.*")):
        if "__pycache__" in path.parts:
            continue
        place = str(path.relative_to(ROOT / "python" / "mamba_eagle"))
        assert any(fnmatch(place, pattern) for pattern in patterns), place


def test_no_file_makes_markup_of_text_or_names_another_site() -> None:
    """Model output is text: of our own files only markdown.js makes anything else of it, by a
    library that lets through what it names."""
    for path in filter(Path.is_file, FOLDER.iterdir()):
        source = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in source, path
        foreign = set(re.findall(r"\w+://[^\s'\"]+", source)) - {"http://www.w3.org/2000/svg"}
        assert not foreign, path
