"""Whether nodes have the same checkpoints: ranks of different ones would make nonsense together."""

import contextlib
import dataclasses
import hashlib
from pathlib import Path

from mamba_eagle.config import ConfigError, EngineConfig, flag_of
from mamba_eagle.core import shown
from mamba_eagle.resolve import resolve

FOLDERS = ("model_path", "tokenizer_path", "speculative_draft_model_path")


def fingerprint(config: EngineConfig) -> str:
    """Hash of a resolved config: the contents of config.json, and names and sizes of the files of
    weights; the model may be a single file. The weights themselves are not read."""
    digest = hashlib.sha256()
    for name in filter(None, (config.model_path, config.speculative_draft_model_path)):
        folder = Path(name)
        settings = folder / "config.json"
        digest.update(settings.read_bytes() if settings.exists() else b"-")
        files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
        for path in files if config.load_format != "dummy" else ():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def same_settings(given: EngineConfig, resolved: EngineConfig, expected: str) -> EngineConfig:
    """The first node's settings with the folders that names have on this machine.

    given, resolved: as they are there. expected: the fingerprint of its checkpoints.

    Raises: ConfigError if files on this machine lead to others.
    """
    config = resolve(given)
    folders = {name: getattr(resolved, name) for name in FOLDERS}
    there = [
        f"{flag_of(spec.name)} {_in_flags(theirs)} instead of {_in_flags(mine)}"
        for spec in dataclasses.fields(EngineConfig)
        if (mine := getattr(dataclasses.replace(config, **folders), spec.name))
        != (theirs := getattr(resolved, spec.name))
    ]
    if there:
        raise ConfigError([f"node 0 has {'; '.join(there)}: are its files others than here?"])
    with contextlib.suppress(OSError):  # what cannot be read, the ranks report
        if fingerprint(config) != expected:
            raise ConfigError(
                [
                    f"the checkpoint in {config.model_path} (or its drafter's) is not node 0's: "
                    "config.json, or names or sizes of the weights differ"
                ]
            )
    return config


def _in_flags(value: object) -> str:
    return "auto" if value is None else shown(value)
