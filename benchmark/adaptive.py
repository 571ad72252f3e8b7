"""Is drafting ever slower than not drafting? Engines that choose their trees, beside fixed ones.

    python -m benchmark.adaptive
    python -m benchmark.adaptive --batch-size 1 8 --rounds 9 --common "--device cpu --cpu-threads 1"
    python -m benchmark.adaptive --geometry --rounds 7
    python -m benchmark.adaptive --servers

Starts all at once: without drafts, with each fixed shape, and adaptive ones with the embedded head
and with one of random weights. They answer the same problems one after the other, in rounds, and
each round gives ratios to its own plain run: a slow minute of the machine hits all. The ratio of
the fastest rounds is what an undisturbed machine would show. Scheduler and runner work in this
process, on a GPU one step ahead as in a server. With --servers whole servers are asked over HTTP;
their processes disturb each other by more than 3 %.
--geometry: the sizes of Nemotron-Nano-9B-v2 and a drafter of two layers, both with random weights,
so that drafts are never right; with and without drafts, and nothing else.
Appends one JSON line per contestant and batch size to benchmark/results/adaptive.jsonl.

Goals: ``useless`` at 0.97 of ``plain`` or more, ``adaptive`` at 0.97 of the best fixed one or more.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmark.lib import adaptive
from benchmark.lib.adaptive import ADAPTIVE, USELESS, Adaptive
from benchmark.lib.answering import Answering, Engine, RemoteServer
from benchmark.lib.problems import prompt_ids
from benchmark.lib.rounds import Contestant, Round, play_rounds
from benchmark.lib.server import ServerProcess, exit_on_sigterm
from mamba_eagle.bench import facts, results
from mamba_eagle.embedded import EMBEDDED_MODEL
from mamba_eagle.eval import gsm8k

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "adaptive.jsonl"
TARGET, DRAFTER = HERE / "models" / "nemotron-nano-9b-v2", HERE / "models" / "llama-2-layers"


def problems() -> list[list[int]]:
    """The embedded ones, as token ids."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    return prompt_ids(gsm8k.read_examples(gsm8k.EMBEDDED_PROBLEMS), tokenizer)


def any_tokens(length: int = 256) -> list[list[int]]:
    """For weights that mean nothing."""
    return [[first + k for k in range(length)] for first in range(100)]


def start(
    flags: dict[str, list[str]], servers: bool, stack: contextlib.ExitStack
) -> list[Adaptive]:
    """Engines, or servers that end with ``stack``."""
    if not servers:
        return [Contestant(name, Engine(own)) for name, own in flags.items()]

    def serve(own: list[str]) -> str:
        server = ServerProcess([*own, "--skip-tokenizer-init"])
        stack.callback(server.stop)
        server.wait_until_answering()
        return server.base_url

    with ThreadPoolExecutor() as pool:
        urls = pool.map(serve, flags.values())
        return [Contestant(name, RemoteServer(url)) for name, url in zip(flags, urls)]


def measure(contestants: list[Adaptive], args: argparse.Namespace, about: dict[str, Any]) -> None:
    """All batch sizes; prints and appends what was found."""
    prompts = any_tokens() if args.geometry else problems()
    shapes = [] if args.geometry else args.fixed
    for batch in args.batch_size:
        asked = [prompts[i % len(prompts)] for i in range(args.problems * batch)]

        def play(answering: Answering, asked: list[list[int]] = asked, batch: int = batch) -> Round:
            return answering.answer(asked, batch, args.max_new_tokens)

        for contestant in contestants:
            for _ in range(args.warm_up):  # it learns what pays
                play(contestant.player)
        play_rounds(contestants, play, args.rounds)
        for comparison in adaptive.compare(contestants, shapes):
            print(comparison.row(batch), flush=True)
            results.append(args.results, [comparison.line(batch, about)])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--problems", type=int, default=4, help="of each client in a round")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument(
        "--geometry", action="store_true", help="a model of 9B parameters, weights random"
    )
    parser.add_argument(
        "--fixed",
        nargs="+",
        default=["4x5x16", "2x5x8", "1x5x6"],
        metavar="TOPKxSTEPSxNODES",
        help="shapes that are always drafted; the first is the largest of those that choose",
    )
    parser.add_argument("--servers", action="store_true", help="ask servers over HTTP")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--common", default="", help="flags for all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    exit_on_sigterm()
    machine = facts.facts("cpu" if "--device cpu" in args.common else "auto")
    about = {
        "over_http": args.servers,
        "geometry": "nemotron-nano-9b-v2" if args.geometry else "embedded",
        **machine,
    }
    with contextlib.ExitStack() as stack:
        if args.geometry:
            flags = adaptive.geometry_flags(TARGET, DRAFTER, args.fixed[0])
        else:
            useless_head = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            adaptive.write_useless_head(useless_head)
            flags = adaptive.embedded_flags(args.fixed, useless_head)
        common = [*adaptive.SHARED, *shlex.split(args.common)]
        flags = {name: [*common, *own] for name, own in flags.items()}
        contestants = start(flags, args.servers, stack)
        print(f"{machine['gpu']}, commit {machine['commit']}, {args.rounds} rounds")
        print(adaptive.HEADER)
        measure(contestants, args, about)
        for contestant in contestants:
            if contestant.name in (ADAPTIVE, USELESS):
                print(adaptive.shapes_used(contestant))


if __name__ == "__main__":
    main()
