"""Checkpoint folders by their Hugging Face name."""

from __future__ import annotations

import json
import re
from pathlib import Path

NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
OTHER_LAYOUTS = ["consolidated*", "original/*"]  # second copies of the weights


class NotFound(ValueError):
    """There is no such folder and no such name; the text says what was tried."""


def checkpoint_folder(path: str, revision: str = "", weights: bool = True) -> Path:
    """``path`` itself if it is a folder; else the folder of a ``user/name`` in the local cache,
    where it is downloaded if need be.

    Args:
        revision: branch, tag or commit; empty: the default branch.
        weights: whether the weights are needed, or only the files that describe the model.

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
        pass  # not in the cache, or not all of it
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
    """Whether a cached snapshot has what is needed. A download may have been interrupted, or have
    fetched config.json only."""
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / name).is_file() for name in names)
