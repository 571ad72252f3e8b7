"""Print the draft trees of one request: what was drafted, how likely, and what was accepted.

    mamba-eagle explain --text "Question: What is 3 plus 4?"
    mamba-eagle explain --url http://127.0.0.1:30000 --text "Question: What is 3 plus 4?"
    mamba-eagle explain --url http://127.0.0.1:30000 --cache

The text is taken as it stands, as /generate takes it.
"""

import argparse
import math
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from mamba_eagle import explain_cache
from mamba_eagle.bench import client
from mamba_eagle.config import ConfigError, EngineConfig, Parser, add_arguments, from_arguments
from mamba_eagle.core import SamplingParams
from mamba_eagle.server.bodies.kinds import as_text

LONGEST_BAR = 40  # characters
WIDEST = 1000  # characters: no line of a tree is broken
LEGEND = "✓ accepted   ★ the target's own next token (bonus)   0.5 how sure the drafter was\n"
REFUSED = "✗ refused by the grammar\n"


class ExplainError(RuntimeError):
    """The request could not be served; says why and what to do."""


# ── the reply: of a running server, or of an engine in this process ──────────────────────────


def ask_server(url: str, text: str, sampling: dict[str, Any], api_key: str) -> dict[str, Any]:
    """The reply of the server at ``url`` to POST /generate.

    Raises: ExplainError
    """
    url = client.full_url(url)
    body = {"text": text, "sampling_params": sampling, "return_spec_trace": True}
    try:
        (reply,) = client.generate_all(url, [body], parallel=1, api_key=api_key)
        reply["meta_info"]["spec_trace"]
    except client.ServerError as error:
        if error.status == 0:
            raise ExplainError(
                f"--url {url}: no answer ({error.message}): start a server with mamba-eagle serve, "
                "or leave --url out to load the model here"
            ) from None
        if error.status != 200:
            why = error.message or "is it a mamba-eagle server?"
            raise ExplainError(
                f"--url {url}: answered {error.status} to /generate: {why}"
            ) from None
        raise no_trace(url) from None
    except (KeyError, TypeError):
        raise no_trace(url) from None
    return reply


def ask_cache(url: str, api_key: str) -> dict[str, Any]:
    """The reply of the server at ``url`` to GET /cache.

    Raises: ExplainError
    """
    url = client.full_url(url)
    try:
        reply = client.read_cache(url, api_key)
    except client.ServerError as error:
        raise ExplainError(f"--url {url}: {error}") from None
    if not isinstance(reply, dict) or "kv_slots" not in reply:
        raise ExplainError(f"--url {url}: answered /cache without kv_slots: is it mamba-eagle?")
    return reply


def no_trace(url: str) -> ExplainError:
    return ExplainError(
        f"--url {url}: answered without meta_info.spec_trace: it is not a mamba-eagle server, or "
        "one older than this command"
    )


def ask_engine(config: EngineConfig, text: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """What a server with these settings would reply if it drafted the configured tree in every
    step; one request is too short to learn which tree is fastest. The model is loaded here.

    Raises: ExplainError, ConfigError
    """
    from mamba_eagle.engine import Engine, EngineError  # a server's packages

    settings = {**vars(config), "speculative_adaptive": False, "log_level": "warning"}
    try:
        with Engine(**settings) as engine:
            return engine.generate(text, sampling, return_spec_trace=True)
    except EngineError as error:
        raise ExplainError(str(error)) from None


# ── the drawing ──────────────────────────────────────────────────────────────────────────────


def certainty(step: dict[str, Any], node: int) -> float:
    """How sure the drafter was of a node after its parent; scores are sums of logarithms along a
    path, and JSON has null where one is minus infinity."""
    own, above = step["scores"][node], step["scores"][step["parents"][node]]
    return 0.0 if own is None or above is None else math.exp(min(own - above, 0.0))


def token_names(step: dict[str, Any]) -> list[str]:
    """Of the nodes and, last, the bonus: texts in quotes, with escapes, or ids where the server
    has no tokenizer."""
    if "token_texts" in step:
        return [repr(text) for text in (*step["token_texts"], step["bonus_text"])]
    return [f"#{token}" for token in (*step["tokens"], step["bonus"])]


def step_tree(step: dict[str, Any]) -> Tree:
    """✓ before accepted nodes, ★ before the bonus, ✗ before those that the grammar refused."""
    accepted, names, refused = step["accepted"], token_names(step), step.get("refused", [])
    branches = [Tree(Text(names[0], "bold"), guide_style="dim")]
    bonus_drawn = False
    for node in range(1, len(step["tokens"])):
        label = f"{names[node]} {certainty(step, node):.3f}"
        parent = step["parents"][node]
        if node in accepted:
            text = Text(f"✓ {label}", "green")
        elif parent == accepted[-1] and step["tokens"][node] == step["bonus"]:
            # it was drafted as well, but the output ends with it
            bonus_drawn = True
            text = Text(f"★ {label}", "cyan")
        elif node in refused:
            text = Text(f"✗ {label}", "dim red")
        else:
            text = Text(label, "dim")
        branches.append(branches[parent].add(text))
    if not bonus_drawn:
        branches[accepted[-1]].add(Text(f"★ {names[-1]}", "cyan"))
    return branches[0]


def histogram_lines(steps: list[dict[str, Any]]) -> list[str]:
    """How many steps accepted how many drafts."""
    counts = [0] * max(len(step["accepted"]) for step in steps)
    for step in steps:
        counts[len(step["accepted"]) - 1] += 1
    scale = min(1.0, LONGEST_BAR / max(counts))
    return [
        f"  {drafts:>2} {count:>5} {'█' * math.ceil(count * scale)}".rstrip()
        for drafts, count in enumerate(counts)
    ]


def show(reply: dict[str, Any], console: Console) -> None:
    """All trees, then the summary."""
    meta = reply["meta_info"]
    steps = meta["spec_trace"]
    any_refused = any(step.get("refused") for step in steps)
    console.print(Text(LEGEND + REFUSED * any_refused, "dim"))
    for number, step in enumerate(steps, start=1):
        drafted, accepted = len(step["tokens"]) - 1, len(step["accepted"]) - 1
        console.print(Text(f"step {number}: {drafted} drafted, {accepted} accepted", "bold"))
        console.print(step_tree(step))
        console.print()
    made = sum(len(step["accepted"]) for step in steps)
    summary = [
        f"text: {reply['text']!r}",
        f"tokens: {meta['prompt_tokens']} in the prompt, {len(reply['output_ids'])} new, "
        f"{made} of them in {len(steps)} steps (the first came with the prompt)",
    ]
    if steps:
        summary.append(f"acceptance length: {made / len(steps):.2f} tokens per step")
        summary += ["steps by accepted drafts:", *histogram_lines(steps)]
    console.print(Text("\n".join(summary)), soft_wrap=True)


# ── the command ──────────────────────────────────────────────────────────────────────────────


def make_parser() -> Parser:
    parser = Parser(prog="mamba-eagle explain", description=(__doc__ or "").partition("\n")[0])
    own = parser.add_argument_group("the request")
    own.add_argument(
        "--cache", action="store_true", help="draw what the prefix cache of --url holds instead"
    )
    own.add_argument("--text", default="", help="the prompt, taken as it stands")
    own.add_argument("--max-new-tokens", type=int, default=64)
    own.add_argument("--temperature", type=float, default=0.0)
    own.add_argument("--seed", type=int, default=0, help="of the samples, above temperature 0")
    own.add_argument("--json-schema", default="", help="constrain the output to this JSON schema")
    own.add_argument("--regex", default="", help="constrain the output to this pattern")
    client.add_server_flags(own)
    own.add_argument(
        "--json", action="store_true", help="print the whole reply, meta_info.spec_trace within"
    )
    add_arguments(parser, EngineConfig)
    return parser


def ask(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Raises: ExplainError, ConfigError"""
    sampling: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    if problems := SamplingParams(**sampling).problems(vocab_size=1):
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    sampling |= {"json_schema": args.json_schema or None, "regex": args.regex or None}
    if args.url:
        return ask_server(args.url, args.text, sampling, args.api_key)
    return ask_engine(config, args.text, sampling)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    config: EngineConfig = from_arguments(EngineConfig, args)
    if args.cache:
        if args.text or not args.url:
            parser.error("--cache: shows the cache of a running server: give --url, and no --text")
    elif not as_text(args.text):
        parser.error(f"--text {args.text!r}: must be text in valid UTF-8, not empty")
    elif args.url and config != EngineConfig():
        parser.error(f"--url {args.url}: the server has its own model; leave the model's flags out")
    try:
        reply = ask_cache(args.url, args.api_key) if args.cache else ask(args, config)
    except (ExplainError, ConfigError) as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(msgspec.json.encode(reply).decode())
    else:
        draw = explain_cache.show if args.cache else show
        draw(reply, Console(highlight=False, width=WIDEST))


if __name__ == "__main__":
    main()
