"""``mamba-eagle serve | bench | eval | explain | run-batch | train-drafter | completion``.

Each also runs by ``python -m``.
"""

import difflib
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
    "run-batch": ("mamba_eagle.run_batch", "answer a file of requests, without a server"),
    "train-drafter": ("mamba_eagle.train.command", "train a draft head for a model"),
    "completion": ("mamba_eagle.completion", "print what bash or zsh completes flags by"),
}
RECIPE_HINT = """\
no command 'train'. How the embedded model was made is not part of the package; in a checkout of
the repository recipes/mamba2_math/README.md has the commands. They begin with
  PYTHONPATH=recipes python -m mamba2_math.
To train a draft head: mamba-eagle train-drafter"""


def usage() -> str:
    lines = ["usage: mamba-eagle COMMAND [options]", ""]
    lines += [f"  {name:<14} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "mamba-eagle COMMAND --help lists the options of a command."]
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
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        message = f"no command {command!r}{hint}\n\n{usage()}"
        if command == "train":
            message = RECIPE_HINT
        print(f"mamba-eagle: {message}", file=sys.stderr)
        return 2
    loaded = importlib.import_module(COMMANDS[command][0])
    sys.argv[0] = f"mamba-eagle {command}"  # in --help
    return loaded.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
