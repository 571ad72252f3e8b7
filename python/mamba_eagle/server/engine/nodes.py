"""What the launcher asks of other nodes, and the reasons why an engine ends."""

from collections.abc import Callable
from typing import NamedTuple

from mamba_eagle.message import Heartbeat

OnFault = Callable[["Fault"], None]


class Fault(NamedTuple):
    """Why the engine cannot go on. Those that explain others compare as less."""

    weight: int  # LOST_NODE, KILLED or ENDED
    text: str
    code: int  # the server's exit code


LOST_NODE, KILLED, ENDED = range(3)


def fault(text: str, code: int) -> Fault:
    """The fault of a process that ended with this exit code, 0 or less if it was killed."""
    return Fault(KILLED if code < 0 else ENDED, text, max(code, 0) or 1)


class Nodes:
    """No other nodes: everything runs on this machine."""

    def __init__(self, on_fault: OnFault) -> None:
        """on_fault: called with why the engine ends; may be called more than once."""
        self.on_fault = on_fault

    async def start(self) -> None:
        """Before the engine's processes are. What is in the way is a fault."""

    def judge(self, found: Fault) -> None:
        """A process on this node has ended."""
        self.on_fault(found)

    def take_beats(self) -> list[Heartbeat]:
        """Heartbeats of the ranks on other nodes since the last call."""
        return []

    def write_stacks(self) -> None:
        """Where the ranks of other nodes hang, to their logs."""

    def stop(self) -> None:
        """The server ends, and the others with it."""

    async def close(self) -> None:
        """After ``stop``; nothing may follow."""
