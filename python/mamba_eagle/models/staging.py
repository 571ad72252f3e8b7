"""Tensors of files on a GPU: several threads read them into pinned memory, which is copied from
while they read on. Read by the page faults of one thread, a warm file comes at a tenth of that."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mamba_eagle.models.stored import Stored

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
THREADS = 12
PIECE = 16 << 20  # bytes that are read at a time


class Piece(NamedTuple):
    """Of a tensor; what a buffer takes."""

    file: int  # descriptor
    begin: int  # in the file
    size: int


class Copied(Protocol):
    """A point in the device's work."""

    def wait(self) -> None: ...


class Buffer:
    """Memory of the host, and the copy that has read it last."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.copied: Copied | None = None

    def fill(self, piece: Piece) -> None:
        """Raises: OSError if the file has become shorter."""
        if self.copied is not None:
            self.copied.wait()
        room, at = memoryview(self.data.numpy().data)[: piece.size], 0
        while at < piece.size:
            count = os.preadv(piece.file, [room[at:]], piece.begin + at)
            if not count:
                raise OSError("a file of weights has become shorter while it was read")
            at += count


class Staging(NamedTuple):
    """How tensors get to a device with memory of its own: as Place's."""

    device: torch.device
    host_buffer: Callable[[int], Tensor]
    timestamp: Callable[[], Copied]

    def tensors(self, stored: Sequence[Stored]) -> Iterator[Tensor]:
        """Each on the device, one after the other, for what is launched later. Raises: OSError"""
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            for each in stored:
                if each.file not in files:
                    files[each.file] = os.open(each.file, os.O_RDONLY)
                    stack.callback(os.close, files[each.file])
            threads = stack.enter_context(ThreadPoolExecutor(THREADS, "weights"))
            stack.callback(threads.shutdown, cancel_futures=True)  # if the caller has had enough
            pieces = iter([piece for each in stored for piece in _pieces(each, files[each.file])])
            under_way: deque[tuple[Buffer, Future[None]]] = deque()

            def read_on(buffer: Buffer) -> None:
                if (piece := next(pieces, None)) is not None:
                    under_way.append((buffer, threads.submit(buffer.fill, piece)))

            room = self.host_buffer(2 * THREADS * PIECE)
            for data in room.split(PIECE):
                read_on(Buffer(data))
            for each in stored:
                value = torch.empty(each.nbytes, dtype=torch.uint8, device=self.device)
                for part in value.split(PIECE):
                    buffer, read = under_way.popleft()
                    read.result()
                    part.copy_(buffer.data[: len(part)], non_blocking=True)
                    buffer.copied = self.timestamp()
                    read_on(buffer)
                yield value.view(DTYPES[each.dtype]).view(each.shape)


def _pieces(tensor: Stored, file: int) -> Iterator[Piece]:
    for at in range(0, tensor.nbytes, PIECE):
        yield Piece(file, tensor.begin + at, min(PIECE, tensor.nbytes - at))
