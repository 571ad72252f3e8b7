"""Batches: each line of a file is a request to this server, its reply a line of another file.
Files are in a folder of this server, each for the key that made it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from starlette.types import ASGIApp

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_BATCH_LINES, MAX_BATCHES, MAX_FILES, MAX_FILES_BYTES
from mamba_eagle.server.apis.batches.lines import Line, read_lines
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.asgi_client import Call
from mamba_eagle.server.lifetime import Lifetime


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

    @contextlib.contextmanager
    def more(self, key: str, path: Path, size: int) -> Iterator[BinaryIO]:
        """A file of the key's, to add ``size`` bytes to; as it was before if that fails.

        Raises: RequestError 413; OSError
        """
        count = len(self.of(key))
        if self._used[key] + size > MAX_FILES_BYTES or count >= MAX_FILES:
            raise RequestError(
                f"{count} files of {self._used[key]} bytes are kept, and {size} bytes more do not "
                f"fit: there may be {MAX_FILES} of {MAX_FILES_BYTES} bytes; delete some",
                413,
            )
        before = path.stat().st_size if path.exists() else 0
        self._used[key] += size
        try:
            with open(path, "ab") as file:
                yield file
        except BaseException:
            self._used[key] -= size
            with contextlib.suppress(OSError):
                os.truncate(path, before) if before else path.unlink()
            raise

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

    def hold(self, file: StoredFile) -> Path:
        """Another name of what it has, for who reads it later: it may be removed before."""
        path = self.new_path()
        os.link(file.path, path)
        return path

    def remove(self, key: str, id: str) -> None:
        """Who holds it goes on. Raises: RequestError 404"""
        file = self.find(key, id)
        file.path.unlink(missing_ok=True)
        self._used[key] -= file.size
        del self._files[id]


log = logging.getLogger("mamba_eagle.server")
WINDOW = 24 * 3600  # seconds that a batch may take
FULL_PAUSE = 1.0  # seconds until a line that found no room is tried again
PIECE = 2**20  # bytes of a reply that are looked at, or written, in a turn of the event loop
SUCCESS, UNAVAILABLE = 200, 503
# Unicode's own, which readers may take for that of a line, and how JSON spells them.
LINE_ENDS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}
ENDED = ("completed", "failed", "cancelled", "expired")


class Batch:
    """One of a key's; a task runs it. metadata: the client's own."""

    def __init__(self, key: str, endpoint: str, source: StoredFile, metadata: Any) -> None:
        self.id = f"batch_{secrets.token_hex(12)}"
        self.key, self.endpoint, self.source, self.metadata = key, endpoint, source, metadata
        self.times: dict[str, int] = {}
        self.set_status("validating", "created_at")
        self.counts = {"total": 0, "completed": 0, "failed": 0}
        self.files: dict[str, StoredFile] = {}  # output and error, those that have a line
        self.problem = ""
        self.task: asyncio.Task[None] | None = None
        self._paths: dict[str, Path] = {}  # of those files
        self.requests: Path  # its own name of the source
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()

    def set_status(self, status: str, time_name: str = "") -> None:
        self.status = status
        self.times[time_name or f"{status}_at"] = int(time.time())

    def as_dict(self) -> dict[str, Any]:
        names = "created in_progress finalizing completed failed expired cancelling cancelled"
        problem = {"code": "invalid_file", "message": self.problem, "line": None, "param": None}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "status": self.status,
            "errors": {"object": "list", "data": [problem]} if self.problem else None,
            "input_file_id": self.source.id,
            "completion_window": "24h",
            "request_counts": self.counts,
            "metadata": self.metadata,
            "expires_at": self.times["created_at"] + WINDOW,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names.split()},
            **{
                f"{kind}_file_id": self.files[kind].id if kind in self.files else None
                for kind in ("output", "error")
            },
        }

    def cancel(self) -> None:
        """What has been answered stays."""
        if self.status in ("validating", "in_progress") and self.task is not None:
            self.set_status("cancelling")
            self.task.cancel()

    # ── its lines are answered, some at a time ───────────────────────────────────────────────

    async def run(self, store: BatchStore, at_once: int) -> None:
        """Ends in one of ENDED, whatever happens."""
        try:
            await asyncio.wait_for(self._answer_all(store, at_once), WINDOW)
            self.set_status("completed")
        except asyncio.TimeoutError:
            self.set_status("expired")
        except asyncio.CancelledError:
            self.set_status("cancelled")
        except RequestError as error:
            self.problem = error.message
            self.set_status("failed")
        except Exception:
            log.exception("batch %s failed", self.id)
            self.problem = "the batch failed; see the server log"
            self.set_status("failed")
        finally:
            self.requests.unlink(missing_ok=True)
            for kind, path in self._paths.items():
                name, purpose = f"{self.id}_{kind}.jsonl", "batch_output"
                self.files[kind] = store.files.add(self.key, name, purpose, path)

    async def _answer_all(self, store: BatchStore, at_once: int) -> None:
        path = self.requests
        self.counts["total"] = await asyncio.to_thread(_count_lines, path)
        self.set_status("in_progress")
        lines = read_lines(path, (self.endpoint,))
        workers = [asyncio.ensure_future(self._work(store, lines)) for _ in range(at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        self.set_status("finalizing")

    async def _work(self, store: BatchStore, lines: Iterator[Line]) -> None:
        while True:
            async with store.places:
                line = await self._next(lines)
                if line is None:
                    return
                await self._answer(store, line)

    async def _answer(self, store: BatchStore, line: Line) -> None:
        if line.problem:
            reply = LineReply([json.dumps(line.refused()).encode()], True)
        else:
            reply = await store.reply(line, self.key)
        await self._write(store.files, "error" if reply.is_error else "output", reply.parts)
        self.counts["failed" if reply.is_error else "completed"] += 1

    async def _next(self, lines: Iterator[Line]) -> Line | None:
        async with self._reading:
            return await asyncio.to_thread(next, lines, None)

    async def _write(self, files: FileStore, kind: str, parts: Sequence[bytes]) -> None:
        async with self._writing:
            path = self._paths.get(kind) or files.new_path()
            with files.more(self.key, path, sum(map(len, parts)) + 1) as file:
                for part in (*parts, b"\n"):
                    file.write(part)
                    await _give_way(part)
            self._paths[kind] = path


class LineReply(NamedTuple):
    """A line of the output or the error file, without its end."""

    parts: Sequence[bytes]
    is_error: bool


async def _reply(line: Line, status: int, body: bytes) -> LineReply:
    """body: as the route has sent it, which may be as long as a million logprobs: it is not read
    again, and goes through in pieces."""
    if status != SUCCESS:
        return LineReply([json.dumps(line.answered(status, json.loads(body))).encode()], True)
    # No text has this: quotes within are escaped.
    before, after = json.dumps(line.answered(status, None)).encode().split(b'"body": null', 1)
    parts, begin = [before + b'"body": '], 0
    while begin < len(body):
        end = begin + PIECE
        while end < len(body) and body[end] & 0xC0 == 0x80:  # within a character
            end += 1
        piece, begin = body[begin:end], end
        for char, spelled in LINE_ENDS.items():
            piece = piece.replace(char, spelled)
        parts.append(piece)
        await _give_way(piece)
    return LineReply([*parts, after], False)


async def _give_way(piece: bytes) -> None:
    """Others have their turn behind a long one."""
    if len(piece) >= PIECE:
        await asyncio.sleep(0)


class BatchStore:
    """All batches, and the application that answers their lines."""

    def __init__(self, app: ASGIApp, lifetime: Lifetime, folder: str) -> None:
        self.files = FileStore(folder)
        self._app, self._lifetime = app, lifetime
        self._batches: dict[str, Batch] = {}  # the oldest first
        self.places = asyncio.Semaphore()  # of lines that are being answered

    def start(self, batch: Batch, at_once: int) -> None:
        """at_once: lines of all batches that are with the engine, so that other requests find room
        beside them; batches take turns. The oldest batch that has ended makes room.

        Raises: RequestError 503
        """
        own = self.of(batch.key)
        if len(own) >= MAX_BATCHES:
            ended = [one.id for one in own if one.status in ENDED]
            if not ended:
                message = f"{MAX_BATCHES} batches have not ended, the most: try again later"
                raise RequestError(message, UNAVAILABLE, retry_after=60)
            del self._batches[ended[-1]]
        if not self._batches:  # the first one
            self.places = asyncio.Semaphore(at_once)
        batch.requests = self.files.hold(batch.source)
        self._batches[batch.id] = batch
        batch.task = asyncio.get_running_loop().create_task(batch.run(self, at_once))

    async def reply(self, line: Line, key: str) -> LineReply:
        """Once the server has room for it. Raises: RequestError 503 if that ends"""
        while True:
            if self._lifetime.refusal is not None:
                raise RequestError(self._lifetime.refusal, UNAVAILABLE)
            call = Call(self._app, line.url, line.body, key)
            text = await call.whole()
            if call.status != UNAVAILABLE:
                return await _reply(line, call.status, text)
            await asyncio.sleep(FULL_PAUSE)

    def of(self, key: str) -> list[Batch]:
        """The newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.key == key]

    def find(self, key: str, id: str) -> Batch:
        """Raises: RequestError 404"""
        batch = self._batches.get(id)
        if batch is None or batch.key != key:
            remedy = "there is no such batch: it was another API key's, or went to make room"
            raise RequestError(f"batch = {shown(id)}: {remedy}", 404)
        return batch


def _count_lines(path: Path) -> int:
    """Raises: RequestError for too many, or none"""
    with open(path, "rb") as file:
        count = sum(1 for text in file if text.strip())
    if not 0 < count <= MAX_BATCH_LINES:
        raise RequestError(f"the file has {count} requests: it must have 1 to {MAX_BATCH_LINES}")
    return count
