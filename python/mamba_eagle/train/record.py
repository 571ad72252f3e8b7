"""``training.json``: the settings of a run, which a resumed run must repeat, and its results."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mamba_eagle.config import ConfigError, flag_of
from mamba_eagle.train.settings import CHANGEABLE, TrainSettings

NAME = "training.json"


class Record:
    """The ``training.json`` of one output folder."""

    def __init__(self, settings: TrainSettings) -> None:
        self.path = Path(settings.output) / NAME
        self.settings = asdict(settings)
        self.data_hash = hashlib.sha256(Path(settings.data).read_bytes()).hexdigest()

    def check(self) -> bool:
        """Returns: whether the folder holds a finished run of these settings.

        Raises: ConfigError if its run was started with settings that give other answers or weights.
        """
        if not self.path.is_file():
            return False
        before = json.loads(self.path.read_text(encoding="utf-8"))
        wrong = [
            f"{flag_of(name)} {self.settings[name]}: {self.path.parent} was started with {value}"
            for name, value in before["settings"].items()
            if name not in (*CHANGEABLE, "output", "data") and value != self.settings.get(name)
        ]
        if before["data_sha256"] != self.data_hash:
            wrong.append(
                f"--data {self.settings['data']}: {self.path.parent} was started with another "
                "content of the file"
            )
        if wrong:
            raise ConfigError([*wrong, "resume with the same settings or choose another --output"])
        return bool(before["finished"])

    def write(self, command: str, result: dict[str, Any] | None = None) -> None:
        """Writes the file atomically.

        Args:
            result: what the training has achieved; None when it starts.
        """
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
