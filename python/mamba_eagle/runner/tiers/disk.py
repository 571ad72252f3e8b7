"""Units in a file, with checksums, and the log that says what they are; and units in files for
other servers, and from them."""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from mamba_eagle.cache.tiers import disk_log
from mamba_eagle.config import ConfigError
from mamba_eagle.core import shown
from mamba_eagle.message.indices import Indices
from mamba_eagle.runner.tiers.host import runs

MIN_LOG = 1 << 26  # bytes below which the log is not compacted while the server runs
OWN_FOLDER = re.compile(r"[0-9a-f]{32}")  # named after a fingerprint


def record_of(label: bytes, rows: np.ndarray) -> disk_log.Record:
    """The record of units [n, unit bytes], with the label that the scheduler has made."""
    sums = b"".join(disk_log.unit_sum(row.data) for row in rows)
    return disk_log.Record(msgspec.msgpack.decode(label, type=disk_log.Label), sums)


class DamagedUnits(OSError):
    """Units of the file are not what was written."""


class DiskUnits:
    """A folder of one server, for prefixes that one set of weights has computed.

    Each method but the first is called in one thread, in order.
    """

    def __init__(self, cache_dir: str, fingerprint: str, count: int, unit_bytes: int) -> None:
        """Removes what other weights have left in ``cache_dir``.

        Raises: ConfigError."""
        self.count, self.unit_bytes = count, unit_bytes
        try:
            folder = Path(cache_dir).expanduser() / fingerprint
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder.parent / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    [f"--cache-dir {shown(cache_dir)}: another server uses it; give each its own"]
                ) from None
            for other in folder.parent.iterdir():
                if OWN_FOLDER.fullmatch(other.name) and other.name != fingerprint:
                    shutil.rmtree(other)
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
            self.log = folder / "log"
            self._units = self._open(folder / "units", os.O_RDWR)
            os.ftruncate(self._units, count * unit_bytes)  # takes space as it is written
            self.sums = np.zeros((count, disk_log.SUM_BYTES), dtype=np.uint8)
            self._compact_at = MIN_LOG
            self._log = self._open(self.log, os.O_WRONLY | os.O_APPEND)
        except (OSError, RuntimeError) as error:  # RuntimeError: no such ~user
            raise ConfigError([f"--cache-dir {shown(cache_dir)}: {error}"]) from error

    @staticmethod
    def _open(path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def restore(self) -> None:
        """The sums of what is there, and a log without what newer records have overwritten. To be
        called first, and again when the log has grown."""
        found = disk_log.read_log(str(self.log))
        records = disk_log.live(found.records, self.count)
        for record in records:
            sums = np.frombuffer(record.sums, dtype=np.uint8).reshape(-1, disk_log.SUM_BYTES)
            self.sums[disk_log.units_of(record)] = sums
        if found.ignored or len(records) < len(found.records):
            fresh = self.log.with_suffix(".new")
            with open(self._open(fresh, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.writelines(map(disk_log.framed, records))
            fresh.rename(self.log)
        os.close(self._log)
        self._log = self._open(self.log, os.O_WRONLY | os.O_APPEND)
        self._compact_at = max(MIN_LOG, 2 * self.log.stat().st_size)

    def write(self, units: Indices, rows: Tensor, label: bytes) -> None:
        """rows: [n, unit bytes] uint8 on the host. Raises: OSError, and then nothing is logged."""
        self.sums[np.asarray(units)] = 0  # what is there is of no use, however far this comes
        data = rows.contiguous().numpy()
        for part, place in self._spans(units, data.data.cast("B")):
            while part:
                done = os.pwrite(self._units, part, place)
                part, place = part[done:], place + done
        made = record_of(label, data)
        sums = np.frombuffer(made.sums, dtype=np.uint8).reshape(-1, disk_log.SUM_BYTES)
        self.sums[np.asarray(units)] = sums
        record, size = disk_log.framed(made), os.fstat(self._log).st_size
        if os.write(self._log, record) < len(record):
            os.ftruncate(self._log, size)
            raise OSError(f"{self.log}: no room for the whole record")
        if size > self._compact_at:
            self.restore()

    def read(self, units: Indices, rows: Tensor) -> None:
        """Into rows [n, unit bytes] uint8 on the host. Raises: OSError, or DamagedUnits."""
        data = rows.numpy()
        for part, place in self._spans(units, data.data.cast("B")):
            if os.preadv(self._units, [part], place) < len(part):
                raise DamagedUnits(f"{self.log.parent}: the file of units is too short")
        for unit, own in zip(units, data):
            if disk_log.unit_sum(own.data) != self.sums[unit].tobytes():
                raise DamagedUnits(f"{self.log.parent}: unit {unit} is not what was written")

    def _spans(self, units: Indices, data: memoryview) -> Iterator[tuple[memoryview, int]]:
        """Parts of ``data`` [n * unit bytes], and where they are in the file."""
        size = self.unit_bytes
        for first, span in runs(units):
            yield data[first * size : (first + span.stop - span.start) * size], span.start * size

    def empty(self) -> None:
        """Forget all."""
        os.ftruncate(self._log, 0)
        os.ftruncate(self._units, 0)
        os.ftruncate(self._units, self.count * self.unit_bytes)
        self.sums[:] = 0

    def close(self) -> None:
        for each in (self._log, self._units, self._lock):
            os.close(each)


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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "wb") as file:
            if not file.seek(0, os.SEEK_END):
                file.write(msgspec.json.encode(self.facts) + b"\n")
            file.write(disk_log.framed(record_of(label, data)))
            file.write(data.data)

    def read(self, path: str, units: Indices, rows: Tensor) -> None:
        """Into rows [n, unit bytes] uint8 on the host.

        Raises: OSError, DamagedUnits, ForeignFile."""
        try:
            found = disk_log.read_export(path)
        except disk_log.TornFile as error:
            raise ForeignFile(str(error)) from error
        if differs := disk_log.difference(found.facts, self.facts):
            raise ForeignFile(differs)
        with open(path, "rb") as file:
            for unit, row in zip(units, rows.numpy()):
                placed = found.units[unit]
                file.seek(placed.offset)
                if file.readinto(row.data) < len(row) or disk_log.unit_sum(row.data) != placed.sum:
                    raise DamagedUnits(f"unit {unit} is not what was written")
