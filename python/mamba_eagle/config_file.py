"""``--config FILE``: settings in YAML, under the names of the flags.

    model-path: /models/nemotron
    port: 31000
    disable-radix-cache: true

The file stands for flags at the beginning of the command line, so that flags given there win.
"""

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mamba_eagle.config import ConfigError, Parser, add_arguments, flag_of
from mamba_eagle.core import shown

FLAG = "--config"


class _AsWritten(yaml.SafeLoader):
    """Reads texts and null: YAML's number 0123 is 83, and an API key may be one."""

    yaml_implicit_resolvers = {
        first: [resolver for resolver in resolvers if resolver[0].endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """For --help; ``with_config_file`` reads it."""
    parser.add_argument(
        FLAG, metavar="FILE", help="file of settings in YAML, under the flags' names; flags win"
    )


def with_config_file(arguments: Sequence[str], config: type) -> list[str]:
    """The command line with the file's settings in front of the flags.

    Raises: ConfigError with everything that is wrong with the file.
    """
    finder = Parser(add_help=False)  # knows all flags, so that it reads abbreviations as they do
    add_config_flag(finder)
    add_arguments(finder, config)
    path = finder.parse_known_args(arguments)[0].config
    if path is None:
        return list(arguments)
    return [*_as_flags(_read(path), path, config), *arguments]


def _read(path: str) -> dict[str, Any]:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _AsWritten)
    except OSError as error:
        raise ConfigError([f"{FLAG} {path}: {error.strerror or error}"]) from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"{FLAG} {path}: is not YAML: {reason[:200]}"]) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError([f"{FLAG} {path}: must have lines of the form 'port: 30000'"])
    return values


def _as_flags(values: dict[str, Any], path: str, config: type) -> list[str]:
    kinds = typing.get_type_hints(config)
    settings = {spec.name: spec for spec in dataclasses.fields(config)}
    flags: list[str] = []
    problems: list[str] = []
    for key, value in values.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in settings:
            close = difflib.get_close_matches(name, settings, 1)
            hint = f"; do you mean {close[0].replace('_', '-')}?" if close else ""
            problems.append(f"{FLAG} {path}: {shown(key)} is not a setting{hint}")
        elif kinds[name] is bool:
            wanted = yaml.SafeLoader.bool_values.get(str(value).lower())
            if wanted is None:
                problems.append(f"{FLAG} {path}: {key}: {shown(value)}: must be true or false")
            elif wanted != settings[name].default:
                flags.append(flag_of(name) if wanted else "--no-" + name.replace("_", "-"))
        elif value is None and settings[name].default is None:
            flags += [flag_of(name), "auto"]
        else:
            repeats = isinstance(value, list) and settings[name].metadata["repeats"]
            texts = value if repeats else [value]
            if all(isinstance(text, str) for text in texts):
                flags += [f"{flag_of(name)}={text}" for text in texts]
            else:
                problems.append(f"{FLAG} {path}: {key}: {shown(value)}: must be a text or a number")
    if problems:
        raise ConfigError(problems)
    return flags
