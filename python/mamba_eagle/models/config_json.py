"""A checkpoint's config.json and the files that complete it, unparsed."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mamba_eagle.hub import is_gguf
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.parse import eos_tokens


@contextlib.contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Puts the name of the config in ``folder`` in front of the message of an UnsupportedModel
    raised inside."""
    try:
        yield
    except UnsupportedModel as error:
        file = folder if is_gguf(folder) else Path(folder, "config.json")
        raise UnsupportedModel(f"{file}: {error}") from None


def read_values(folder: str | Path) -> dict[str, Any]:
    """config.json with the stop tokens of generation_config.json and, if it describes no
    quantization itself, that of ModelOpt's hf_quant_config.json; or what a GGUF file has in its
    place.

    Raises: FileNotFoundError if there is no config.json; UnsupportedModel for broken files.
    """
    folder = Path(folder)
    if is_gguf(folder):
        # Imported here: few checkpoints need its packages.
        from mamba_eagle.gguf_files.config import config_values
        from mamba_eagle.gguf_files.file import open_gguf

        return config_values(open_gguf(folder))
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the folder of a checkpoint")
    values = read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        generation_values = read_json(generation)
        if generation_values.get("eos_token_id") is not None:
            try:
                values["eos_token_id"] = list(eos_tokens(generation_values))
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{generation}: {error}") from None
    modelopt = folder / "hf_quant_config.json"
    if modelopt.is_file() and not values.get("quantization_config"):
        values["quantization_config"] = {"quant_method": "modelopt", **read_json(modelopt)}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Raises: UnsupportedModel if the file holds anything but a JSON object."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise UnsupportedModel(
            f"{path} holds {str(values)[:200]} instead of a JSON object; download it again"
        )
    return values
