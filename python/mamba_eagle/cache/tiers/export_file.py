"""A prefix in a file that one server writes and another one reads.

    file    facts, as one line of JSON
            [ size | checksum | label, sums ] units of kv, state, journal      for each copy

Nothing that is read is trusted: records and units have checksums, and what they name is counted.
"""

import os
from typing import Any, NamedTuple

import msgspec

from mamba_eagle.cache.tiers.disk_log import HEAD_BYTES, SUM_BYTES, Record, unframed, units_of

MAX_FACTS = 1 << 16  # bytes


class TornFile(ValueError):
    """What was exported is not whole."""


class PlacedUnit(NamedTuple):
    offset: int  # in the file, in bytes
    sum: bytes


class ExportFile(NamedTuple):
    facts: dict[str, Any]  # of the server that wrote it
    records: list[Record]
    units: dict[int, PlacedUnit]  # by number


def read_export(path: str) -> ExportFile:
    """All but the units themselves. Raises: TornFile."""
    records: list[Record] = []
    units: dict[int, PlacedUnit] = {}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            facts = msgspec.json.decode(file.readline(MAX_FACTS), type=dict[str, Any])
            unit_bytes = msgspec.convert(facts.get("unit_bytes"), int)
            while file.tell() < size:
                head = file.read(HEAD_BYTES)
                record = unframed(head + file.read(int.from_bytes(head[:4], "little")))
                sums = [
                    record.sums[i : i + SUM_BYTES] for i in range(0, len(record.sums), SUM_BYTES)
                ]
                for unit, each in zip(units_of(record).tolist(), sums, strict=True):
                    units[unit] = PlacedUnit(file.tell(), each)
                    file.seek(unit_bytes, os.SEEK_CUR)
                records.append(record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TornFile("it is not what /export_prefix has answered, or a part of it") from error
        if file.tell() != size or sorted(units) != list(range(len(units))):
            raise TornFile("it is not whole")
    return ExportFile(facts, records, units)


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The first fact in which two servers differ, with both values; "" if there is none."""
    for name in ours | theirs:
        if theirs.get(name) != ours.get(name):
            return f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} here"
    return ""
