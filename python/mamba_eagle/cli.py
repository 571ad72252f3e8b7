"""``mamba-eagle serve | bench | eval | explain | train-drafter | train``.

Each also runs by ``python -m``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mamba_eagle import __version__

# Imported when called: serving needs no torch in this process, training no HTTP.
COMMANDS = {
    "serve": ("mamba_eagle.launch_server", "serve a model over HTTP"),
    "bench": ("mamba_eagle.bench_one_batch", "time one batch, without a server"),
    "eval": ("mamba_eagle.eval.few_shot_gsm8k", "few-shot GSM8K against a running server"),
    "explain": ("mamba_eagle.explain", "print the draft trees of one request"),
    "train-drafter": ("mamba_eagle.train.drafter.command", "train a draft head for a model"),
}
TRAIN = "mamba_eagle.train"


def usage() -> str:
    lines = ["usage: mamba-eagle COMMAND [options]", ""]
    lines += [f"  {name:<14} {text}" for name, (_, text) in COMMANDS.items()]
    lines += [f"  {'train RECIPE':<14} run {TRAIN}.RECIPE", ""]
    lines += ["mamba-eagle COMMAND --help lists the options of a command."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    command, rest = arguments[0], arguments[1:]
    if command == "train":
        if not rest or not rest[0].replace("_", "").isalnum():
            print("usage: mamba-eagle train RECIPE [options]", file=sys.stderr)
            return 2
        module, rest = f"{TRAIN}.{rest[0]}", rest[1:]
    elif command in COMMANDS:
        module = COMMANDS[command][0]
    else:
        print(f"mamba-eagle: no command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        print(f"mamba-eagle: there is no {module}", file=sys.stderr)
        return 2
    sys.argv[0] = " ".join(["mamba-eagle", *arguments[: len(arguments) - len(rest)]])  # in --help
    return loaded.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
