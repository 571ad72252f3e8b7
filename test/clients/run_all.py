"""Client programs, unchanged, against this server; each in an environment of its own.

    .venv/bin/python test/clients/run_all.py                   # all of them
    .venv/bin/python test/clients/run_all.py openai anthropic  # only these
    .venv/bin/python test/clients/run_all.py --table docs/clients.md

Starts one server with the embedded model. Makes an environment per client from the package index,
runs with_CLIENT.py in it, and removes it. Prints a line per check; exits with 1 if one has failed.
``--table`` writes the table between the marks in that page; it takes rows of clients that did not
run this time from the table that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from mamba_eagle.embedded import EMBEDDED_MODEL

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # the folder of benchmark/

from benchmark.lib.server import PACKAGE_ROOT, ServerProcess, exit_on_sigterm  # noqa: E402

MODEL = "mamba2-math-6m"
FLAGS = ("--device", "cpu", "--dtype", "float32", "--served-model-name", MODEL)
FORMS = ("--chat-template", str(HERE / "chat_template.jinja"))
PARSER = ("--tool-call-parser", str(HERE / "family.json"))
TORCH = f"torch=={version('torch').partition('+')[0]}"
MARKS = ("<!-- made by test/clients/run_all.py -->", "<!-- end -->")
TIMEOUT = 1800.0  # seconds per client
# What SGLang's two clients import. It lists many more, most of them for GPUs.
SGLANG = (
    "transformers requests aiohttp numpy tqdm pillow pybase64 orjson httpx openai psutil datasets "
    "pyzmq fastapi uvicorn pydantic msgspec packaging IPython partial-json-parser regex triton"
).split()


class Client(NamedTuple):
    """What its environment gets. ``alone``: without what it depends on."""

    script: str
    packages: Sequence[str]
    alone: Sequence[str] = ()


CLIENTS = {
    "openai": Client("with_openai.py", ["openai"]),
    "anthropic": Client("with_anthropic.py", ["anthropic"]),
    "litellm": Client("with_litellm.py", ["litellm", "mcp"]),  # it imports mcp for tools
    "langchain-openai": Client("with_langchain.py", ["langchain-openai"]),
    "instructor": Client("with_instructor.py", ["instructor"]),
    "pydantic-ai": Client("with_pydantic_ai.py", ["pydantic-ai-slim[openai,anthropic]"]),
    "lm-eval": Client("with_lm_eval.py", ["lm-eval[api]"]),
    "sglang": Client("with_sglang.py", [TORCH, *SGLANG], ["sglang"]),
    "guidellm": Client("with_guidellm.py", [TORCH, "guidellm"]),
}


class Outcome(NamedTuple):
    """Of one check; ``problem`` is "" if it went well."""

    client: str
    version: str
    what: str
    problem: str


def make_environment(folder: Path, client: Client) -> Path:
    """Its interpreter. Raises: CalledProcessError"""
    python = folder / "bin" / "python"
    uv = shutil.which("uv")
    venv.create(folder, with_pip=uv is None)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    links = {}
    if uv is not None:  # the same in a tenth of the time
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        links = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    for packages, flags in ((client.packages, []), (client.alone, ["--no-deps"])):
        if packages:
            subprocess.run([*install, *flags, *packages], check=True, env={**os.environ, **links})
    return python


def run_client(name: str, client: Client, base_url: str) -> list[Outcome]:
    """Its environment is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="clients-") as temporary:
        folder = Path(temporary)
        try:
            python = make_environment(folder / "venv", client)
        except subprocess.CalledProcessError as error:
            return [Outcome(name, "", "install", f"exit code {error.returncode}")]
        results = folder / "results.jsonl"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {
            "MAMBA_EAGLE_URL": base_url,
            "MAMBA_EAGLE_MODEL": MODEL,
            "MAMBA_EAGLE_TOKENIZER": str(EMBEDDED_MODEL),
            "MAMBA_EAGLE_PYTHON": sys.executable,
            "MAMBA_EAGLE_CLIENT_RESULTS": str(results),
            "HF_HOME": str(folder / "hf"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it asks the network for prices otherwise
        }
        problem = ""
        try:
            command = [str(python), str(HERE / client.script)]
            code = subprocess.run(command, env=environment, cwd=folder, timeout=TIMEOUT).returncode
        except subprocess.TimeoutExpired:
            code, problem = 1, f"took more than {TIMEOUT:.0f} s"
        lines = results.read_text().splitlines() if results.exists() else []
        outcomes = [Outcome(name, *list(json.loads(line).values())[1:]) for line in lines]
        if code and not any(outcome.problem for outcome in outcomes):
            problem = problem or f"exit code {code}"
            outcomes.append(Outcome(name, "", client.script, problem))
        return outcomes


# ── the table ────────────────────────────────────────────────────────────────────────────────


def rows(outcomes: Sequence[Outcome], date: str) -> dict[str, str]:
    """A row per client."""
    made = {}
    for name in dict.fromkeys(outcome.client for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.client == name]
        ran = "; ".join(outcome.what for outcome in own)
        bad = "; ".join(f"{o.what}: {o.problem}" for o in own if o.problem).replace("|", "\\|")
        made[name] = f"| `{name}` | {own[0].version} | {date} | {ran} | {bad or 'ok'} |"
    return made


def write_table(page: Path, new: dict[str, str]) -> None:
    text = page.read_text()
    before, begin, rest = text.partition(MARKS[0])
    old, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{page} lacks the lines {MARKS[0]} and {MARKS[1]}")
    found = re.findall(r"^(\| `([^`]+)` \|.*)$", old, re.MULTILINE)
    kept = {name: row for row, name in found} | new
    head = "| client | version | date | what ran | result |\n|---|---|---|---|---|\n"
    body = "\n".join(kept[name] for name in CLIENTS if name in kept)
    page.write_text(f"{before}{begin}\n\n{head}{body}\n\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table into this page")
    parser.add_argument("--flags", default="", help="more flags for the server")
    args = parser.parse_args()
    if unknown := set(args.clients) - set(CLIENTS):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(CLIENTS)}")
    exit_on_sigterm()
    outcomes: list[Outcome] = []
    date = datetime.date.today().isoformat()
    environment = {"PYTHONPATH": str(PACKAGE_ROOT)}
    flags = [*FLAGS, *FORMS, *PARSER, *args.flags.split()]
    with ServerProcess(flags, environment=environment) as server:
        for name in args.clients or CLIENTS:
            outcomes += run_client(name, CLIENTS[name], server.base_url)
            if args.table:
                write_table(args.table, rows(outcomes, date))
    failed = [outcome for outcome in outcomes if outcome.problem]
    for outcome in failed:
        print(f"FAILED {outcome.client}: {outcome.what}: {outcome.problem}")
    print(f"{len(outcomes)} checks, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
