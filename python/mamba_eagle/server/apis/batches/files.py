"""Files of requests and of replies: in a folder of this server, each for the key that made it."""

import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_FILES, MAX_FILES_BYTES
from mamba_eagle.server.errors import RequestError


@dataclass(frozen=True)
class StoredFile:
    """``size`` in bytes, ``created`` in seconds since 1970."""

    id: str
    key: str
    name: str
    purpose: str
    size: int
    created: int
    path: Path

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """They end with the server, whose folder they are in. What is full takes no more, and loses
    nothing."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder, "files")
        self._files: dict[str, StoredFile] = {}  # the oldest first
        self._used: Counter[str] = Counter()  # bytes by key

    def take(self, key: str, size: int) -> None:
        """Room for ``size`` bytes more of the key's.

        Raises: RequestError 413
        """
        count = len(self.of(key))
        if self._used[key] + size > MAX_FILES_BYTES or count >= MAX_FILES:
            raise RequestError(
                f"{count} files of {self._used[key]} bytes are kept, and {size} bytes more do not "
                f"fit: there may be {MAX_FILES} of {MAX_FILES_BYTES} bytes; delete some",
                413,
            )
        self._used[key] += size

    def new_path(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        return self._folder / secrets.token_hex(12)

    def add(self, key: str, name: str, purpose: str, path: Path) -> StoredFile:
        """Takes over what is at ``path``, for which there is room."""
        id, size = f"file-{secrets.token_hex(12)}", path.stat().st_size
        file = StoredFile(id, key, name, purpose, size, int(time.time()), path)
        self._files[id] = file
        return file

    def of(self, key: str) -> list[StoredFile]:
        return [file for file in self._files.values() if file.key == key]

    def find(self, key: str, id: str, param: str | None = None) -> StoredFile:
        """param: the field that names it. Raises: RequestError 404"""
        file = self._files.get(id)
        if file is None or file.key != key:
            remedy = "there is no such file: it was deleted, or belongs to another API key"
            raise RequestError(f"{param or 'file'} = {shown(id)}: {remedy}", 404, param)
        return file

    def remove(self, key: str, id: str) -> None:
        """What reads it goes on. Raises: RequestError 404"""
        file = self.find(key, id)
        file.path.unlink(missing_ok=True)
        self._used[key] -= file.size
        del self._files[id]
