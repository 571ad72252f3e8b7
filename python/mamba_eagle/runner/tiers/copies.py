"""Copies of cached blocks that plans name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.place import Place, Timestamp
from mamba_eagle.message import Blocks, Plan, StepResult, TierCopy, TierSizes
from mamba_eagle.message.indices import Indices
from mamba_eagle.runner.tiers.disk import DamagedUnits, DiskUnits, ExportFiles, ForeignFile
from mamba_eagle.runner.tiers.host import HostUnits, PinnedUnits
from mamba_eagle.runner.tiers.slot_bytes import DeviceSlots, SlotBytes
from mamba_eagle.runner.tiers.whole import WholeUnits

log = logging.getLogger("mamba_eagle.runner")
PATIENCE_SECONDS = 0.002  # that a plan without steps waits for copies
STAGED_BYTES = 1 << 30  # that wait on the device for their way to the host, about


class InThread(NamedTuple):
    """A copy under way in the thread of the disk."""

    work: Future[None]

    @property
    def reached(self) -> bool:
        return self.work.done()

    def wait(self) -> OSError | None:
        """Until its end. Why the copy is lost, on all ranks.

        Raises: what has ended this rank's exchange with the others."""
        error = self.work.exception()
        if error is None or isinstance(error, OSError):
            return error
        raise error


class TierCopies:
    """Of one rank. ``leave`` and ``come`` are called within a step, where its order asks for it."""

    def __init__(
        self,
        slots: DeviceSlots,
        sizes: TierSizes,
        whole: WholeUnits,
        place: Place,
        disk: DiskUnits | None = None,
        exports: ExportFiles | None = None,
    ) -> None:
        self.exports = exports
        self.slots, self.sizes, self.place, self.disk = slots, sizes, place, disk
        self.whole, self.unit_bytes = whole, whole.own_bytes[whole.group.rank]
        kind = HostUnits if place.on_host else PinnedUnits
        self.host = kind(sizes.host_units, self.unit_bytes, place)
        self.thread = ThreadPoolExecutor(1, "disk cache")
        if disk is not None:
            self.thread.submit(disk.restore)
        if exports is not None:
            self.thread.submit(exports.find_facts)
        # under way; those of the device, on its side stream, end at a time
        self.launched: dict[int, Timestamp | InThread] = {}
        self.written = place.timestamp()  # the newest copy to the host

    def leave(self, plan: Plan) -> None:
        """What goes from the device, before its slots are written."""
        for number in plan.arrived:
            if number in self.launched:  # another rank was faster; units may change hands now
                self.launched.pop(number).wait()
        if plan.empties_disk and self.disk is not None:
            self.thread.submit(self.disk.empty)
        staged = 0
        for copy in plan.copies:
            if copy.source.tier == 0:
                units = _units(copy.target)
                if staged > STAGED_BYTES:  # many states at once: rather a late step than no memory
                    self.written.wait()
                    staged = 0
                rows = self._read(copy.source, len(units))
                staged += rows.nbytes
                with self.host.beside():
                    self.host.store(units, rows)
                    self.written = self.place.timestamp()
            elif copy.target.tier != 0:
                self.launched[copy.number] = InThread(self._submit(copy))

    def come(self, plan: Plan) -> None:
        """What comes to the device, after all else has read its slots."""
        for copy in plan.copies:
            if copy.target.tier == 0:
                with self.host.beside():
                    self._write(copy.target, self.host.fetch(_units(copy.source)))
                    self.launched[copy.number] = self.place.timestamp()

    # ── disk, and files of other servers ──────────────────────────────────────────────────────────

    def _submit(self, copy: TierCopy) -> Future[None]:
        """In the thread, in order, and after the copies to the host that came before."""
        before = self.written
        work = self._restore if copy.target.tier == 1 else self._save
        return self.thread.submit(self._after, before, work, copy)

    def _after(self, before: Timestamp, work: Callable[[TierCopy], None], copy: TierCopy) -> None:
        before.wait()
        try:
            work(copy)
        except OSError as error:
            log.warning("the prefix cache loses a prefix: %s", error)
            raise

    def _save(self, copy: TierCopy) -> None:
        rows = self.host.data[torch.as_tensor(np.asarray(_units(copy.source)))]
        whole = self.whole.collect(rows, copy.source)
        self.whole.first_does(lambda: self._to_file(copy, whole))

    def _to_file(self, copy: TierCopy, rows: Tensor | None) -> None:
        assert rows is not None
        if copy.path:
            assert self.exports is not None
            self.exports.write(copy.path, rows, copy.label)
        else:
            assert self.disk is not None
            self.disk.write(_units(copy.target), rows, copy.label)

    def _restore(self, copy: TierCopy) -> None:
        whole = self.whole.first_does(lambda: self._from_file(copy))
        rows = self.whole.hand_out(whole, copy.target)
        self.host.data[torch.as_tensor(np.asarray(_units(copy.target)))] = rows

    def _from_file(self, copy: TierCopy) -> Tensor:
        units = _units(copy.source)
        rows = torch.empty(len(units), self.whole.unit_bytes, dtype=torch.uint8)
        if copy.path:
            assert self.exports is not None
            self.exports.read(copy.path, units, rows)
        else:
            assert self.disk is not None
            self.disk.read(units, rows)
        return rows

    # ── the device ───────────────────────────────────────────────────────────────────────────

    def _parts(
        self, blocks: Blocks, rows: Tensor
    ) -> Iterator[tuple[SlotBytes, int | Tensor, Tensor]]:
        """The device's side of a copy: slots, and their rows. rows: [n, unit bytes], KV one token
        per unit, then the state, then the journal."""
        slots, sizes, first = self.slots, self.sizes, 0
        for part, ids, units in (
            (slots.kv, blocks.kv, len(blocks.kv)),
            (slots.states, blocks.state, sizes.state_units),
            (slots.journals, blocks.journal, sizes.journal_units),
        ):
            if len(ids) and units:
                own = rows[first : first + units].view(len(ids), -1)  # a state's: in several units
                one = len(ids) == 1
                yield part, ids[0] if one else self.place.to_device(np.asarray(ids)), own
                first += units

    def _read(self, blocks: Blocks, units: int) -> Tensor:
        """[units, unit bytes]. The next steps wait for it, so it passes over the bytes once."""
        device = self.place.device
        rows = torch.empty(units, self.unit_bytes, dtype=torch.uint8, device=device)
        for part, ids, own in self._parts(blocks, rows):
            part.read(ids, own)
        return rows

    def _write(self, blocks: Blocks, rows: Tensor) -> None:
        for part, ids, own in self._parts(blocks, rows):
            part.write(ids, own)

    # ── results ──────────────────────────────────────────────────────────────────────────────

    @property
    def any_ended(self) -> bool:
        return not self.launched or any(each.reached for each in self.launched.values())

    def report(self, result: StepResult) -> None:
        """Names in ``result`` what has ended since the last call. A copy to the host has no part
        in it: it cannot fail."""
        for number, launch in list(self.launched.items()):
            if launch.reached:
                del self.launched[number]
                error = launch.wait() if isinstance(launch, InThread) else None
                (result.lost if error is not None else result.copied).append(number)
                if isinstance(error, (ForeignFile, DamagedUnits)):
                    result.problems[number] = str(error)

    def close(self) -> None:
        self.thread.shutdown()
        if self.disk is not None:
            self.disk.close()


class StepCopies(NamedTuple):
    """What a step has to do with copies: a plan without prompts and trees waits for one that ends,
    but for a moment only, since the results of other steps come after its own."""

    copies: TierCopies
    until: float  # time.monotonic(); 0: it does not wait

    @classmethod
    def of(cls, copies: TierCopies, plan: Plan) -> StepCopies:
        waits = not plan.prefill and plan.decode is None
        return cls(copies, time.monotonic() + PATIENCE_SECONDS if waits else 0.0)

    @property
    def reached(self) -> bool:
        return not self.until or self.copies.any_ended or time.monotonic() >= self.until

    def report(self, result: StepResult) -> None:
        while not self.reached:
            time.sleep(PATIENCE_SECONDS / 20)
        self.copies.report(result)


def _units(blocks: Blocks) -> Indices:
    """Of a tier in units, in the order of the rows."""
    return blocks.kv + blocks.state + blocks.journal
