"""Units in files for other servers, and from them."""

import os
from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from mamba_eagle.cache.tiers.disk_log import Label, Record, framed, unit_sum
from mamba_eagle.cache.tiers.export_file import TornFile, difference, read_export
from mamba_eagle.message.indices import Indices
from mamba_eagle.runner.tiers.disk import DamagedUnits


class ForeignFile(OSError):
    """What another server has exported is of no use here."""


class ExportFiles:
    """Of one rank. Each method is called in one thread, in order."""

    def __init__(self, find_facts: Callable[[], dict[str, Any]]) -> None:
        """find_facts: what two servers must have in common; reads parts of the weights' files."""
        self._find_facts = find_facts

    def find_facts(self) -> None:
        """To be called first: of the weights that were loaded, whatever their files are later."""
        self.facts = self._find_facts()

    def write(self, path: str, rows: Tensor, label: bytes) -> None:
        """Appends rows [n, unit bytes] uint8 on the host. Raises: OSError."""
        data = rows.contiguous().numpy()
        record = Record(
            msgspec.msgpack.decode(label, type=Label),
            b"".join(unit_sum(unit.data) for unit in data),
        )
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "wb") as file:
            if not file.seek(0, os.SEEK_END):
                file.write(msgspec.json.encode(self.facts) + b"\n")
            file.write(framed(record))
            file.write(data.data)

    def read(self, path: str, units: Indices, rows: Tensor) -> None:
        """Into rows [n, unit bytes] uint8 on the host.

        Raises: OSError, DamagedUnits, ForeignFile."""
        try:
            found = read_export(path)
        except TornFile as error:
            raise ForeignFile(str(error)) from error
        if differs := difference(found.facts, self.facts):
            raise ForeignFile(differs)
        with open(path, "rb") as file:
            for unit, row in zip(units, rows.numpy()):
                placed = found.units[unit]
                file.seek(placed.offset)
                if file.readinto(row.data) < len(row) or unit_sum(row.data) != placed.sum:
                    raise DamagedUnits(f"unit {unit} is not what was written")
