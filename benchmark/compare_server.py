"""The same questions to servers with different settings: equal texts, accuracy, speed.

    python benchmark/compare_server.py --num-questions 200
    python benchmark/compare_server.py --config plain="--speculative-algorithm NONE" \\
        --config chain="--speculative-eagle-topk 1 --speculative-num-draft-tokens 5"

Starts one server after the other on this machine. The first configuration is what the others are
compared with. Exits with 1 if any text differs. On a GPU in bfloat16 texts may part at a near-tie;
there the accuracies are what to look at.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import httpx

from mamba_eagle.eval import gsm8k, machine
from mamba_eagle.eval.few_shot_gsm8k import Outcome, measure

DEFAULT_CONFIGS = {
    "none": "--speculative-algorithm NONE",
    "eagle": "--speculative-algorithm EAGLE",
    "eagle-snapshot": "--speculative-algorithm EAGLE --mamba-verify-mode snapshot",
}


@contextlib.contextmanager
def running_server(
    flags: list[str], start_timeout: float = 300.0, log_file: IO[str] | None = None
) -> Iterator[str]:
    """Start a server on a free port, yield its base URL, and stop it.

    log_file: what it prints goes there; None: nowhere.
    Raises: RuntimeError with the end of its log if it does not become ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mamba_eagle.launch_server", "--port", str(port), *flags]
    base_url = f"http://127.0.0.1:{port}"
    with contextlib.nullcontext(log_file) if log_file else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            if not wait_until_ready(process, base_url, start_timeout):
                log.seek(0)
                raise RuntimeError(f"{shlex.join(command)} did not start:\n{log.read()[-4000:]}")
            yield base_url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], base_url: str, timeout: float) -> bool:
    """Whether the server answers before ``timeout`` seconds are over and before it dies."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.get(f"{base_url}/health_generate", timeout=30, trust_env=False)
            if reply.status_code == 200:
                return True
        time.sleep(0.2)
    return False


def parse_configs(values: list[str]) -> dict[str, list[str]]:
    configs = {}
    for value in values:
        name, found, flags = value.partition("=")
        if not found:
            raise ValueError(f"--config {value}: must be NAME=FLAGS")
        configs[name] = shlex.split(flags)
    return configs


def differences(task: gsm8k.Task, base: Outcome, other: Outcome) -> list[str]:
    """One text for each question whose two answers differ, with where they part."""
    found = []
    for number, (problem, one, two) in enumerate(zip(task.questions, base.replies, other.replies)):
        if one.text != two.text:
            pairs = zip(f"{one.text}\0", f"{two.text}\1")  # the ends make two texts part at last
            at = next(k for k, (a, b) in enumerate(pairs) if a != b)
            found.append(
                f"question {number} ({problem.question[:50]!r}…), after {at} characters:\n"
                f"    {one.text[at : at + 70]!r}\n    {two.text[at : at + 70]!r}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME=FLAGS",
        help="a server to start; repeat it (default: none, eagle, eagle-snapshot)",
    )
    parser.add_argument("--common", default="", help="flags for all servers")
    parser.add_argument("--data-path", default=str(gsm8k.EMBEDDED_PROBLEMS))
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--result-filename", default="", help="append one JSON line a server")
    args = parser.parse_args()
    # Ended from outside, it must still stop the server it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))

    try:
        configs = parse_configs(
            args.config or [f"{name}={flags}" for name, flags in DEFAULT_CONFIGS.items()]
        )
        task = gsm8k.load_task(args.data_path, args.num_shots, args.num_questions)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{machine.hardware()}, commit {machine.commit()}, {len(task.questions)} questions")
    print(
        f"{'config':>16} {'accuracy':>8} {'invalid':>8} {'token/s':>9} {'accept':>6} {'equal':>9}"
    )
    base: Outcome | None = None
    parted: list[str] = []
    for name, flags in configs.items():
        flags = [*shlex.split(args.common), *flags]
        with running_server(flags) as base_url:
            outcome = measure(base_url, task, args.max_new_tokens, args.temperature, args.parallel)
        base = base or outcome
        found = differences(task, base, outcome)
        parted += [f"{name}: {text}" for text in found]
        equal = len(task.questions) - len(found)
        score = outcome.score
        print(
            f"{name:>16} {score.accuracy:>8.3f} {score.invalid:>8.3f} "
            f"{score.output_throughput:>9.1f} {score.accept_length:>6.2f} "
            f"{f'{equal}/{len(task.questions)}':>9}",
            flush=True,
        )
        if args.result_filename:
            record = {
                "name": name,
                "flags": shlex.join(flags),
                "questions": len(task.questions),
                "num_shots": args.num_shots,
                "parallel": args.parallel,
                **score._asdict(),
                "texts_equal": equal,
                "device": machine.hardware(),
                "commit": machine.commit(),
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            }
            with open(args.result_filename, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    if parted:
        print("\n".join(parted))
        sys.exit(1)


if __name__ == "__main__":
    main()
