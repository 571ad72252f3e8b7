"""Files of one server's prefixes, read from its memory by another one through NIXL, whose UCX uses
what connects them: RDMA, shared memory, or TCP."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

PACKAGES = ("nixl_cu13", "nixl_cu12")  # nixl itself chooses between them, and loads torch to do so
POLL_SECONDS = 0.001
TAKE_SECONDS = 300.0
OFFER_SECONDS = 120.0  # that a file stays for the other server


class TransportError(ValueError):
    """Why a file was not offered or taken."""


class Offer(msgspec.Struct):
    """What the other server needs to read a file."""

    agent: bytes  # NIXL's metadata of the process
    address: int
    size: int  # bytes
    mark: str  # to be sent back once it is read


class Offered(NamedTuple):
    memory: Any
    until: float  # time.monotonic()


class RemoteReads:
    """For a server process, from any of its threads. The agent is made when it is first needed."""

    def __init__(self) -> None:
        self._offered: dict[str, Offered] = {}
        self._lock = threading.Lock()  # an agent that is known twice would be forgotten too early

    @cached_property
    def _agent(self) -> Any:
        """Raises: TransportError if NIXL is not installed."""
        for package in PACKAGES:
            with suppress(ImportError):
                nixl = import_module(f"{package}._api")
                sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
                config = nixl.nixl_agent_config(backends=["UCX"], sync_mode=sync)
                return nixl.nixl_agent(f"mamba-eagle-{secrets.token_hex(8)}", config)
        raise TransportError("NIXL cannot be imported: pip install 'mamba-eagle[nixl]'")

    def offer(self, path: Path) -> bytes:
        """An Offer as JSON. Until it was taken, or for OFFER_SECONDS, the file stays in memory; the
        path may go. Raises: TransportError"""
        with self._lock, _told():
            data, mark = np.memmap(path, np.uint8, "r+"), secrets.token_hex(8)
            held = self._agent.register_memory([_described(data, "")], "DRAM")
            self._offered[mark] = Offered((data, held), time.monotonic() + OFFER_SECONDS)
            where = self._agent.get_agent_metadata(), data.ctypes.data, len(data)
            return msgspec.json.encode(Offer(*where, mark))

    def withdraw(self) -> bool:
        """Release what was taken, or not in time. Returns whether nothing is left."""
        with self._lock, _told():
            if self._offered:
                sent = self._agent.get_new_notifs().values()
                taken = {mark.decode() for marks in sent for mark in marks}
                for mark, (memory, until) in list(self._offered.items()):
                    if mark in taken or time.monotonic() > until:
                        del self._offered[mark]
                        self._agent.deregister_memory(memory[1])
        return not self._offered

    def take(self, offered: bytes, path: Path, most: int) -> None:
        """Writes the file of another server's offer to ``path``. most: bytes.

        Raises: TransportError"""
        try:
            offer = msgspec.json.decode(offered, type=Offer)
        except msgspec.DecodeError as error:
            raise TransportError(f"not what /export_prefix?transport=nixl says: {error}") from error
        if not 0 < offer.size <= most:
            raise TransportError(f"{offer.size} bytes: it may be 1 to {most} (--host-cache-gb)")
        with self._lock, _told(), ExitStack() as stack:
            agent = self._agent
            data = np.memmap(path, np.uint8, "w+", shape=offer.size)
            held = agent.register_memory([_described(data, "")], "DRAM")
            stack.callback(agent.deregister_memory, held)
            peer = agent.add_remote_agent(offer.agent)
            stack.callback(agent.remove_remote_agent, peer)
            places = [_described(data)], [(offer.address, offer.size, 0)]
            here, there = (agent.get_xfer_descs(place, "DRAM") for place in places)
            read = agent.initialize_xfer("READ", here, there, peer, offer.mark.encode())
            stack.callback(agent.release_xfer_handle, read)
            state, until = agent.transfer(read), time.monotonic() + TAKE_SECONDS
            while state == "PROC" and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
                state = agent.check_xfer_state(read)
            if state != "DONE":
                raise TransportError(f"the other server's memory was not read: {state}")


def _described(data: np.ndarray, *more: str) -> tuple[Any, ...]:
    return (data.ctypes.data, len(data), 0, *more)


@contextmanager
def _told() -> Iterator[None]:
    """NIXL's errors have no class in common but Exception."""
    try:
        yield
    except (OSError, TransportError):
        raise
    except Exception as error:
        raise TransportError(f"NIXL: {type(error).__name__} {error}".strip()) from error
