"""What a setting is: a field of a frozen dataclass, from which a flag is made."""

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar

from mamba_eagle.core import is_unicode


class ConfigError(ValueError):
    """Settings that cannot work; ``problems`` lists every one with its remedy."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    minimum: int | None = None,
    group: str = "",
    may_be_empty: bool = True,
    repeats: bool = False,
    alias: str = "",
) -> Any:
    """A field that becomes a flag.

    Args:
        default: None means ``auto``: the runner decides when it knows the model and the machine.
        help: one phrase; the default is added to it.
        minimum: the smallest value that works.
        group: the heading in ``--help`` that begins with this setting.
        may_be_empty: whether a text on the command line may be "", as an unset variable gives.
        repeats: whether the flag takes several values, and may be given several times; the value
            is a tuple then.
        alias: another server's name of a flag that repeats.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "group": group,
        "may_be_empty": may_be_empty,
        "repeats": repeats,
        "alias": alias,
    }
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """Base of each group of settings. A room that needs one group takes that, and is given the
    whole: ``EngineConfig`` is all of them."""

    def problems(self) -> list[str]:
        """Every setting that cannot work, with its value and what to change. Looks at no file."""
        odd: dict[str, str] = {}  # a text -> the first flag that has it: others are made from it
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            for text in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(text, str) and not is_unicode(text):
                    odd.setdefault(text, flag_of(spec.name))
        return [
            f"{flag} {'…' if flag.endswith('api-key') else repr(text)}: is not UTF-8; with letters "
            "beyond ASCII the locale must be UTF-8, too (LC_ALL=C.UTF-8)"
            for text, flag in odd.items()
        ] + [
            f"{flag_of(spec.name)} {value}: must be {minimum} or more"
            + (", or auto" if spec.default is None else "")
            for spec in dataclasses.fields(self)
            if (minimum := spec.metadata["minimum"]) is not None
            and (value := getattr(self, spec.name)) is not None
            and value < minimum
        ]


# ── in Python ──

Made = TypeVar("Made", bound=Settings)
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def unreadable(settings: Settings) -> list[str]:
    """What no flag could have given, of settings made in Python: other types, and values beside the
    choices, which would have no effect."""
    wrong, hints = [], typing.get_type_hints(type(settings))
    for spec in dataclasses.fields(settings):
        value, kind = getattr(settings, spec.name), hints[spec.name]
        if choices := spec.metadata["choices"]:
            allowed, fits = "one of " + ", ".join(choices), value in choices
        elif spec.metadata["repeats"] or value is None and not spec.default:
            continue
        else:
            allowed = KINDS[int if kind == int | None else kind]
            fits = isinstance(value, int | float if kind is float else kind)
        if not fits:
            wrong.append(f"{flag_of(spec.name)} {value!r}: must be {allowed}")
    return wrong


def from_keywords(config: type[Made], caller: str, settings: Mapping[str, Any]) -> Made:
    """The dataclass from what a user gave ``caller``, by names of flags with underscores; paths may
    be Path objects.

    Raises: ConfigError for what is not a setting, or what no flag could have given.
    """
    texts = {name: str(one) for name, one in settings.items() if isinstance(one, PurePath)}
    try:
        made = config(**{**settings, **texts})
    except TypeError as error:
        text = str(error).replace(f"{config.__name__}.__init__()", caller)
        raise ConfigError([text]) from None
    if wrong := unreadable(made):
        raise ConfigError(wrong)
    return made


# ── the command line ──


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what may have been meant: the usage of all flags would
    fill the screen."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [one for one in unknown if one.startswith("-")]
            self.error("; ".join(map(self._unknown, flags or unknown)))
        return parsed

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"{argument!r} belongs to no flag"
        flag = argument.partition("=")[0]
        close = difflib.get_close_matches(flag, self._option_string_actions, 1)
        return f"no flag {flag}" + (f"; did you mean {close[0]}?" if close else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")


def add_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag per field, with the field's default and help. A setting whose default is None also
    takes ``auto``, and 0, which meant ``auto`` up to version 0.1."""
    hints = typing.get_type_hints(config)
    place: argparse._ActionsContainer = parser
    for spec in dataclasses.fields(config):
        if group := spec.metadata["group"]:
            place = parser.add_argument_group(group)
        flag, kind, help_text = flag_of(spec.name), hints[spec.name], spec.metadata["help"]
        if kind is bool and spec.default:
            pair = argparse.BooleanOptionalAction  # --flag and --no-flag
            place.add_argument(flag, action=pair, default=True, help=help_text)
        elif kind is bool:
            place.add_argument(flag, action="store_true", help=help_text)
        elif spec.metadata["repeats"]:
            name = _metavar(spec.name, str)
            place.add_argument(
                *filter(None, (flag, spec.metadata["alias"])),
                action="extend",
                nargs="+",
                type=_reader(str, spec.metadata["may_be_empty"]),
                default=argparse.SUPPRESS,
                metavar=name,
                help=help_text,
            )
        else:
            default = "auto" if spec.default is None else spec.default
            may_be_empty = spec.metadata["may_be_empty"]
            place.add_argument(
                flag,
                type=_reader(kind, may_be_empty),
                # argparse reads a default text as if it had been given.
                default=spec.default if may_be_empty else argparse.SUPPRESS,
                choices=spec.metadata["choices"],
                metavar=None if spec.metadata["choices"] else _metavar(spec.name, kind),
                help=help_text if default == "" else f"{help_text} (default: {default})",
            )


def _reader(kind: Any, may_be_empty: bool) -> Callable[[str], Any]:
    """Reads the value of a flag."""
    if kind == int | None:
        return _number_or_auto
    reader: Callable[[str], Any] = kind if may_be_empty else _not_empty
    return reader


def _not_empty(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError(
            "is empty (an unset variable?): give a value, or leave the flag out"
        )
    return value


def _number_or_auto(text: str) -> int | None:
    """None for ``auto``, and for 0."""
    if text == "auto":
        return None
    try:
        return int(text) or None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is neither a number nor auto") from None


def _metavar(name: str, kind: Any) -> str:
    """PATH for model_path, N for a number."""
    return name.rpartition("_")[2].upper() if kind is str else "N" if kind is not float else "F"


def from_arguments(config: type, arguments: argparse.Namespace) -> Any:
    """The dataclass from parsed flags; other flags of the parser are ignored."""
    names = {spec.name for spec in dataclasses.fields(config)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    several = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return config(**{**given, **several})
