"""Checkpoint folders and GGUF files, and both by their Hugging Face name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
GGUF = ".gguf"
FILE_OF_NAME = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
OTHER_LAYOUTS = ["consolidated*", "original/*"]  # second copies of the weights


class NotFound(ValueError):
    """There is no such folder and no such name; the text says what was tried."""


def is_gguf(path: str | Path) -> bool:
    """Whether the name is that of a GGUF file."""
    return str(path).endswith(GGUF)


def checkpoint_folder(path: str, revision: str = "", weights: bool = True) -> Path:
    """``path`` itself if it is a folder or a GGUF file; else the folder of a ``user/name`` in the
    local cache, where it is downloaded if need be, as is the file of a ``user/name/FILE.gguf``. Of
    a folder without config.json, its GGUF file.

    Args:
        revision: branch, tag or commit; empty: the default branch.
        weights: whether the weights are needed, or only the files that describe the model.

    Raises: NotFound
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        described = ("config.json",) if weights else ("config.json", "tokenizer.json")
        is_checkpoint = any((folder / name).is_file() for name in described)
        found = folder if is_checkpoint else _only_gguf(folder)
        if found is None and weights:
            raise NotFound(
                "the folder has neither config.json nor a GGUF file; give a checkpoint's"
            )
        return found or folder
    if is_gguf(path) and folder.is_file():
        return folder
    form = FILE_OF_NAME if is_gguf(path) else NAME
    if path.startswith((".", "/", "~")) or not form.fullmatch(path):
        missing = "file" if is_gguf(path) else "folder"
        raise NotFound(
            f"no such {missing}; give a checkpoint's folder, a GGUF file or a Hugging Face name"
        )
    if named := FILE_OF_NAME.fullmatch(path):
        return _fetched(path, revision, lambda local: _gguf_of(named, revision, local))
    from huggingface_hub import snapshot_download

    def snapshot(local_files_only: bool) -> Path | None:
        found = snapshot_download(
            path,
            revision=revision or None,
            allow_patterns=SMALL_FILES + (WEIGHTS if weights else []),
            ignore_patterns=OTHER_LAYOUTS,
            local_files_only=local_files_only,
        )
        return Path(found) if not local_files_only or complete(Path(found), weights) else None

    got = _fetched(path, revision, snapshot)
    if weights and not (got / "config.json").is_file():
        raise NotFound(f"{path} has no config.json{_named_files(path, revision)}")
    return got


def _fetched(path: str, revision: str, get: Callable[[bool], Path | None]) -> Path:
    """What ``get`` finds in the local cache, else what it fetches.

    get: takes whether only local files may be used; None: it is not all there.

    Raises: NotFound
    """
    try:
        if cached := get(True):
            return cached
    except (OSError, ValueError):
        pass  # not in the cache, or not all of it
    try:
        fetched = get(False)
        assert fetched is not None
        return fetched
    except (OSError, ValueError) as error:  # the library's own are OSErrors
        where = path + (f", revision {revision}" if revision else "")
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(
            f"no such folder, not in the local cache, and huggingface.co did not give {where} "
            f"({reason}); download it where there is a network (hf download {path}) "
            "and give the folder, or set HF_TOKEN if it is gated"
        ) from None


def _gguf_of(found: re.Match[str], revision: str, local_files_only: bool) -> Path:
    from huggingface_hub import hf_hub_download

    repository, name = found.groups()
    return Path(
        hf_hub_download(
            repository, name, revision=revision or None, local_files_only=local_files_only
        )
    )


def _named_files(path: str, revision: str) -> str:
    """What to name instead, for a message: the GGUF files of a repository."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(path, revision=revision or None)
    except (OSError, ValueError):
        files = []
    names = [f"{path}/{name}" for name in files if is_gguf(name)]
    return f"; name one of its GGUF files: {', '.join(names)}" if names else ""


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder; None if there is none.

    Raises: NotFound if there are several.
    """
    files = sorted(folder.glob(f"*{GGUF}"))
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise NotFound(f"there are several GGUF files in this folder; name one of them: {names}")
    return files[0] if files else None


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
    names = set(json.loads(index.read_bytes())["weight_map"].values())
    return all((folder / name).is_file() for name in names)
