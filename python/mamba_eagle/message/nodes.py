"""What node 0 and the agents of the other nodes tell each other.

agent  ── Join, NodeBeat, NodeFailed, StopAsked ───────────▶ node 0
agent  ◀── Welcome or Refused, FirstBeat, WriteStacks, StopNode ── node 0
"""

from __future__ import annotations

import msgspec

from mamba_eagle.config import EngineConfig
from mamba_eagle.message import Heartbeat, Message
from mamba_eagle.message.link import CurvePair

# A node that is connected but sends no beats for so long hangs. A killed process or a lost machine
# is noticed by its connection.
SILENCE_SECONDS = 30.0


class Join(Message):
    """The first message of an agent."""

    version: str  # of this package; all nodes have the same
    node_rank: int
    nnodes: int
    name: str  # of the machine


class NodeBeat(Message):
    """Sent every BEAT_SECONDS: the agent works. ``beats``: of its ranks, since the last one."""

    beats: list[Heartbeat] = []


class NodeFailed(Message):
    """A rank has ended, or none could be started. Node 0 decides what follows."""

    text: str
    code: int  # the exit code; 0 or less for one that was killed


class StopAsked(Message):
    """The agent was asked to stop by a signal."""


class Welcome(Message):
    """An agent may start its ranks."""

    given: EngineConfig  # node 0's flags; each node finds the folders of names for itself
    resolved: EngineConfig  # what node 0 makes of them, folders aside
    fingerprint: str  # of the checkpoints
    server_key: str  # public key of the sockets for ranks
    own: CurvePair  # what ranks prove themselves with


class Refused(Message):
    """An agent may not join."""

    reason: str


class FirstBeat(Message):
    """Sent every BEAT_SECONDS: node 0 works."""


class WriteStacks(Message):
    """Write the stacks of all ranks to the log."""


class StopNode(Message):
    """End the ranks, then yourself. code: 0 if node 0 was asked to stop."""

    code: int
    text: str = ""


ToFirstNode = Join | NodeBeat | NodeFailed | StopAsked
ToAgent = Welcome | Refused | FirstBeat | WriteStacks | StopNode


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


decode_to_first = msgspec.msgpack.Decoder(ToFirstNode).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
