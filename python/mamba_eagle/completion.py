"""``mamba-eagle completion bash | zsh``: a script that completes commands, flags and their values.

    eval "$(mamba-eagle completion bash)"     in ~/.bashrc
    eval "$(mamba-eagle completion zsh)"      in ~/.zshrc, after compinit

It is made from the commands' own parsers, so it knows the flags of this version.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

SHELLS = ("bash", "zsh")
# zsh reads it by its own emulation.
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = """\
_mamba_eagle() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=""
    local place="${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}"
    case "$place" in
{choices}
    esac
    if [ -z "$words" ]; then
        case "$COMP_CWORD ${{COMP_WORDS[1]}} $current" in
        1*) words={commands} ;;
{flags}
        esac
    fi
    if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$current"))
    else COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _mamba_eagle mamba-eagle
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Print a script that completes mamba-eagle's commands and flags."
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    shell = make_parser().parse_args(argv).shell
    # Looked up here: it imports this module by its name.
    modules = importlib.import_module("mamba_eagle.cli").COMMANDS
    parsers = {
        name: importlib.import_module(module).make_parser() for name, (module, _) in modules.items()
    }
    sys.stdout.write((ZSH if shell == "zsh" else "") + script(parsers))


def script(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """parsers: by command."""
    flags = [
        f"        *\\ {name}\\ -*) words={shlex.quote(' '.join(_flags(parser)))} ;;"
        for name, parser in parsers.items()
    ]
    choices = [line for name, parser in parsers.items() for line in _choices(name, parser)]
    commands = shlex.quote(" ".join(parsers))
    return SCRIPT.format(commands=commands, flags="\n".join(flags), choices="\n".join(choices))


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))


def _choices(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """What may follow a flag, or a command that takes a word."""
    for action in parser._actions:
        if action.choices:
            words = shlex.quote(" ".join(map(str, action.choices)))
            for before in action.option_strings or [name]:
                yield f'    "{name} {before}") words={words} ;;'
