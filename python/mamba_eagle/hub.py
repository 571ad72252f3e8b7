"""Checkpoint folders by their Hugging Face name. No torch: the launcher asks before it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
OTHER_LAYOUTS = ["consolidated*", "original/*"]  # the same weights once more


class NotFound(ValueError):
    """No such folder, and no such name within reach; the text says what was tried."""


def checkpoint_folder(path: str, revision: str = "", weights: bool = True) -> Path:
    """A folder as it is; else a ``user/name`` from the local cache, or downloaded into it.

    Args:
        revision: branch, tag or commit; empty: the default branch.
        weights: whether the weights are needed, or only what describes the model.

    Raises: NotFound
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or not NAME.fullmatch(path):
        raise NotFound("no such folder; give a checkpoint's folder or a Hugging Face name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                path,
                revision=revision or None,
                allow_patterns=SMALL_FILES + (WEIGHTS if weights else []),
                ignore_patterns=OTHER_LAYOUTS,
                local_files_only=local_files_only,
            )
        )

    try:
        cached = snapshot(local_files_only=True)
        if complete(cached, weights):
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not there, or not all of it
    try:
        return snapshot(local_files_only=False)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        where = path + (f", revision {revision}" if revision else "")
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"no such folder, not in the local cache, and huggingface.co did not give {where} "
            f"({reason}); download it where there is a network (hf download {path}) "
            "and give the folder, or set HF_TOKEN if it is gated"
        ) from None


def complete(folder: Path, weights: bool) -> bool:
    """Whether a cached snapshot has what is needed; a download may have been broken off, or have
    asked for config.json alone."""
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / name).is_file() for name in names)
