"""Units of host memory, and copies between them and the device."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.place import Place, zeros
from mamba_eagle.message.indices import Indices

# Of one copy: those of steps, which are small, take their turn between two. On PCIe 5 a sixth of a
# millisecond; a state of a 9B at once would hold them up for three.
PIECE_BYTES = 8 << 20


def runs(units: Indices, most: int = sys.maxsize) -> Iterator[tuple[int, slice]]:
    """Runs of consecutive units, of at most ``most``: where they begin in the list, and which
    units they are."""
    ids = np.asarray(units, dtype=np.int32)
    firsts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    for first, unit, count in zip(firsts, ids[firsts], np.diff(firsts, append=len(ids))):
        for begin in range(0, int(count), most):
            end = min(begin + most, int(count))
            yield int(first) + begin, slice(int(unit) + begin, int(unit) + end)


class HostUnits:
    """data: [units, unit bytes] uint8. Here the device is the host: copies are done at once."""

    def __init__(self, count: int, unit_bytes: int, place: Place) -> None:
        self.place = place
        self.data = self._memory(count, unit_bytes)

    def _memory(self, count: int, unit_bytes: int) -> Tensor:
        return zeros(count, unit_bytes, dtype=torch.uint8, device=torch.device("cpu"))

    def beside(self) -> AbstractContextManager[object]:
        """Work that is launched within comes after all that was launched before, and what is
        launched later does not wait for it."""
        return nullcontext()

    def store(self, units: Indices, rows: Tensor) -> None:
        """rows [n, unit bytes], on the device, from before ``beside``."""
        self.data.index_copy_(0, self.place.to_device(np.asarray(units)), rows)

    def fetch(self, units: Indices) -> Tensor:
        """[n, unit bytes] on the device."""
        return self.data.index_select(0, self.place.to_device(np.asarray(units)))


class PinnedUnits(HostUnits):
    """Of a GPU: in pinned memory, copied on a stream of their own."""

    def __init__(self, count: int, unit_bytes: int, place: Place) -> None:
        super().__init__(count, unit_bytes, place)
        self.stream = torch.cuda.Stream(place.device)
        self.piece = max(1, PIECE_BYTES // unit_bytes)  # units

    def _memory(self, count: int, unit_bytes: int) -> Tensor:
        return self.place.host_buffer(count * unit_bytes).view(count, unit_bytes)

    def beside(self) -> AbstractContextManager[object]:
        self.stream.wait_stream(torch.cuda.current_stream(self.place.device))
        return torch.cuda.stream(self.stream)

    def store(self, units: Indices, rows: Tensor) -> None:
        rows.record_stream(self.stream)
        for first, span in runs(units, self.piece):
            count = span.stop - span.start
            self.data[span].copy_(rows[first : first + count], non_blocking=True)

    def fetch(self, units: Indices) -> Tensor:
        rows = torch.empty(
            len(units), self.data.shape[1], dtype=torch.uint8, device=self.place.device
        )
        for first, span in runs(units, self.piece):
            count = span.stop - span.start
            rows[first : first + count].copy_(self.data[span], non_blocking=True)
        return rows
