"""config.json of a checkpoint as it stands in the folder, with what its neighbours add."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mamba_eagle.model_config import UnsupportedModel


@contextlib.contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Whatever is unsupported inside is said of ``folder``."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from None


def read_values(folder: str | Path) -> dict[str, Any]:
    """config.json, with what its neighbours add: the stop tokens of generation_config.json, and
    the quantization that ModelOpt describes in hf_quant_config.json, where config.json has none.

    Raises: FileNotFoundError where there is no config.json; UnsupportedModel.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the folder of a checkpoint")
    values = read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            values["eos_token_id"] = eos
    modelopt = folder / "hf_quant_config.json"
    if modelopt.is_file() and not values.get("quantization_config"):
        values["quantization_config"] = {"quant_method": "modelopt", **read_json(modelopt)}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Raises: UnsupportedModel where there is something else than a JSON object."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path} is no JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise UnsupportedModel(f"{path} has no JSON object but a {type(values).__name__}")
    return values
