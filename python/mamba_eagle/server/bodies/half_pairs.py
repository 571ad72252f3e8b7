"""Halves of surrogate pairs, deep inside of what a body holds: JSON can write them, no text has
them. Tokenizers refuse them, and no reply could repeat them."""

from typing import Any

from mamba_eagle.core import shown
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.errors import RequestError


def refuse_half_pairs(values: dict[str, Any]) -> None:
    """values: by their paths.

    Raises: RequestError 400 for the first text, or name in an object, that is no valid Unicode.
    """
    waiting = list(reversed(values.items()))
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            if kinds.as_text(value) is None:
                raise RequestError(
                    f"{path} = {shown(value)}: must be a string of valid Unicode", param=path
                )
        elif isinstance(value, dict):
            for name in value:
                if kinds.as_text(name) is None:
                    raise RequestError(
                        f"{path}: the name {shown(name)} must be a string of valid Unicode",
                        param=path,
                    )
            waiting += [(f"{path}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
