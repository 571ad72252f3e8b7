"""Tensors of files on a GPU: several threads read them into pinned memory, which is copied from
while they read on. Read by the page faults of one thread, a warm file comes at a tenth of that."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

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


class Buffer:
    """Pinned memory, and the copy that reads it last."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.data = torch.empty(PIECE, dtype=torch.uint8, pin_memory=on_gpu)
        self.copied = torch.cuda.Event() if on_gpu else None

    def fill(self, piece: Piece) -> None:
        """Raises: OSError if the file has become shorter."""
        if self.copied is not None:
            self.copied.synchronize()
        room, at = memoryview(self.data.numpy().data)[: piece.size], 0
        while at < piece.size:
            count = os.preadv(piece.file, [room[at:]], piece.begin + at)
            if not count:
                raise OSError("a file of weights has become shorter while it was read")
            at += count

    def copy_to(self, room: Tensor) -> None:
        room.copy_(self.data[: len(room)], non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def staged_tensors(tensors: Sequence[Stored], device: torch.device) -> Iterator[Tensor]:
    """Each on ``device``, one after the other, in the order of its stream. Raises: OSError"""
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for each in tensors:
            if each.file not in files:
                files[each.file] = os.open(each.file, os.O_RDONLY)
                stack.callback(os.close, files[each.file])
        threads = stack.enter_context(ThreadPoolExecutor(THREADS, "weights"))
        stack.callback(threads.shutdown, cancel_futures=True)  # where the caller has had enough
        pieces = iter([piece for each in tensors for piece in _pieces(each, files[each.file])])
        under_way: deque[tuple[Buffer, Future[None]]] = deque()

        def read_on(buffer: Buffer) -> None:
            if (piece := next(pieces, None)) is not None:
                under_way.append((buffer, threads.submit(buffer.fill, piece)))

        for _ in range(2 * THREADS):
            read_on(Buffer(device))
        for each in tensors:
            value = torch.empty(each.nbytes, dtype=torch.uint8, device=device)
            for room in value.split(PIECE):
                buffer, read = under_way.popleft()
                read.result()
                buffer.copy_to(room)
                read_on(buffer)
            yield value.view(DTYPES[each.dtype]).view(each.shape)


def _pieces(tensor: Stored, file: int) -> Iterator[Piece]:
    for at in range(0, tensor.nbytes, PIECE):
        yield Piece(file, tensor.begin + at, min(PIECE, tensor.nbytes - at))
