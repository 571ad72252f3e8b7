"""``training.json``: what a run was asked for, so that it goes on as it began, and what it made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mamba_eagle.config import ConfigError
from mamba_eagle.train.drafter.settings import FREE, TrainSettings, flag

NAME = "training.json"


class Record:
    """The file of one output folder."""

    def __init__(self, settings: TrainSettings) -> None:
        self.path = Path(settings.output) / NAME
        self.settings = asdict(settings)
        self.data_hash = hashlib.sha256(Path(settings.data).read_bytes()).hexdigest()

    def check(self) -> bool:
        """Whether the folder's run has ended already.

        Raises: ConfigError if it was begun with settings that give other answers or weights.
        """
        if not self.path.is_file():
            return False
        before = json.loads(self.path.read_text(encoding="utf-8"))
        wrong = [
            f"{flag(name)} {self.settings[name]}: {self.path.parent} was begun with {value}"
            for name, value in before["settings"].items()
            if name not in (*FREE, "output", "data") and value != self.settings.get(name)
        ]
        if before["data_sha256"] != self.data_hash:
            wrong.append(
                f"--data {self.settings['data']}: {self.path.parent} was begun with another content"
            )
        if wrong:
            raise ConfigError([*wrong, "use the same settings to go on, or another --output"])
        return bool(before["finished"])

    def write(self, command: str, result: dict[str, Any] | None = None) -> None:
        """result: what the training has made; None when it begins."""
        value = {
            "finished": result is not None,
            "command": command,
            "settings": self.settings,
            "data_sha256": self.data_hash,
            **(result or {}),
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path)
