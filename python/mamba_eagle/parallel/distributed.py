"""Ranks as processes: where they find each other, and gloo between CPUs, NCCL between GPUs."""

import datetime
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mamba_eagle.message.ranks import RANK_ENVIRONMENT
from mamba_eagle.parallel.groups import Channel, Group
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.parallel.sum_table import COLLECTIVES

# gloo's and NCCL's variables. Who has set them knows the network better.
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
BACKLOG = 4096


class FileMeeting:
    """Ranks of one machine meet at a file in a folder that only their user can read; gloo's and
    NCCL's own connections stay on the loopback interface."""

    def __init__(self, path: str) -> None:
        """path: where there is no file yet."""
        self.path = path

    def store(self, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
        """In which ranks leave each other their addresses."""
        return dist.FileStore(self.path, size)

    def name_interface(self) -> None:
        """Keeps gloo and NCCL to one network interface."""
        if sys.platform == "linux":
            os.environ.setdefault(GLOO_INTERFACE, "lo")
            os.environ.setdefault(NCCL_INTERFACE, "=lo")


class StoreMeeting:
    """Ranks of several machines meet at a store that rank 0 has, on one address of its node.
    Neither the store nor what gloo and NCCL send is encrypted."""

    def __init__(self, host: str, port: int) -> None:
        """Of the store."""
        self.host, self.port = host, port

    def store(self, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
        if rank:
            return dist.TCPStore(self.host, self.port, size, timeout=timeout)
        # torch would listen on all interfaces
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(BACKLOG)
        return dist.TCPStore(
            self.host,
            self.port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def name_interface(self) -> None:
        name = interface_of(own_address_towards(self.host, self.port))
        if name:
            os.environ.setdefault(GLOO_INTERFACE, name)
            os.environ.setdefault(NCCL_INTERFACE, f"={name}")  # exactly this one


def own_address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an address, or else one whose network it is in; None if that
    cannot be found out."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        return _interface_of_6(wanted)
    near = None
    for _, name in socket.if_nameindex():
        try:
            own, mask = (_ask(name, what) for what in (SIOCGIFADDR, SIOCGIFNETMASK))
        except OSError:  # has no address
            continue
        if str(wanted) == own:
            return name
        if wanted in ipaddress.ip_network(f"{own}/{mask}", strict=False):
            near = near or name
    return near


def _ask(interface: str, what: int) -> str:
    """An interface's IPv4 address or mask. Raises: OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), what, request)[20:24])


def _interface_of_6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, *_, name = line.split()
        if ipaddress.IPv6Address(int(digits, 16)) == wanted:
            return name
    return None


# A rank that waits longer for the others ends. The watchdog of the server acts earlier, and says
# where they hang; this is for ranks without one.
TIMEOUT = datetime.timedelta(minutes=10)


# its name in newer versions of torch, and in older ones
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def meet(shard: Shard, device: torch.device, meeting: FileMeeting | StoreMeeting) -> None:
    """Join all ranks, of which ``shard`` says how many there are.

    meeting: where all of them meet, and they alone.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        for name, value in RANK_ENVIRONMENT.items():
            found = os.environ.get(name)
            assert found == value, f"{name}={found}: it must be {value} when a rank starts"
        torch.cuda.set_device(device)
        # Registering the memory of captured operations may make ranks wait for each other while
        # they capture, and pipeline stages capture steps of different kinds.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    meeting.name_interface()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=meeting.store(shard.rank, shard.size, TIMEOUT),
        rank=shard.rank,
        world_size=shard.size,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )


class ProcessGroup(Group):
    """A group of torch.distributed, of all ranks or of some."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        ranks: Sequence[Sequence[int]] = (),
        backend: str | None = None,
    ) -> None:
        """ranks: those of this group and of all others that are made at the same time, each rank in
        one of them; all ranks make them together. shard: of this rank in its own. Without them:
        all ranks. backend: torch's, if it is not what the ranks have met by."""
        super().__init__(shard, device)
        self.ranks, self.group = list(range(shard.size)), None
        # messages on their way, oldest first
        self.posted: dict[Channel, deque[tuple[Any, Tensor]]] = {each: deque() for each in Channel}
        for members in ranks:
            made = dist.new_group(list(members), backend=backend)
            if dist.get_rank() in members:
                self.ranks, self.group = list(members), made
        # The first operations make the connections, which no captured graph could.
        self.sum(torch.zeros(1, device=device))

    @property
    def torchs(self) -> dist.ProcessGroup:
        """torch's group of the same ranks."""
        if self.group is not None:
            return self.group
        whole = dist.group.WORLD
        assert whole is not None, "meet() comes first"
        return whole

    def connect(self) -> None:
        """Also make the connections between neighbours."""
        room = torch.zeros(1, device=self.device)
        if self.rank > 0:
            self.take(room)
        if self.rank + 1 < self.size:
            self.hand_on(room)
        self.from_last(room, Channel.TOKENS)

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def _max(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def _gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, *x.shape)
        all_gather(whole.view(-1), x.view(-1), group=self.group)
        return whole

    def _from_first(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=self.ranks[0], group=self.group)
        return x

    def _from_last(self, x: Tensor, channel: Channel) -> Tensor:
        """A message to each, which no one waits for; on GPUs without mail a broadcast, in the order
        of the plans."""
        if self.mail is not None:
            if self.rank + 1 < self.size:
                self.mail.receive(x, self.size - 1, channel)
            else:
                for rank in range(self.rank):
                    self.mail.send(x, rank, channel)
        elif self.device.type == "cuda":
            dist.broadcast(x, src=self.ranks[-1], group=self.group)
        elif self.rank + 1 < self.size:
            dist.recv(x, src=self.ranks[-1], group=self.group, tag=channel)
        else:
            for rank in self.ranks[:-1]:
                self._post(x, rank, channel)
        return x

    def _hand_on(self, x: Tensor) -> None:
        if self.mail is not None:
            self.mail.send(x, self.rank + 1, Channel.HIDDEN)
        elif self.device.type == "cuda":
            dist.send(x, dst=self.ranks[self.rank + 1], group=self.group)
        else:
            self._post(x, self.ranks[self.rank + 1], Channel.HIDDEN)

    def _take(self, room: Tensor) -> Tensor:
        if self.mail is not None:
            self.mail.receive(room, self.rank - 1, Channel.HIDDEN)
            return room
        tag = 0 if self.device.type == "cuda" else Channel.HIDDEN  # NCCL has no tags
        dist.recv(room, src=self.ranks[self.rank - 1], group=self.group, tag=tag)
        return room

    def _collect(self, x: Tensor) -> list[Tensor] | None:
        every = [torch.empty_like(x) for _ in self.ranks] if self.rank == 0 else None
        dist.gather(x, every, dst=self.ranks[0], group=self.group)
        return every

    def _hand_out(self, parts: list[Tensor] | None, room: Tensor) -> Tensor:
        dist.scatter(room, parts, src=self.ranks[0], group=self.group)
        return room

    def _post(self, x: Tensor, rank: int, channel: Channel) -> None:
        """Send without waiting for it to be received, which another stage may do no sooner than it
        begins the plans that follow. One plan more than there are stages is in flight, with two
        messages of a kind for each stage at most: when twice as many have been sent since, the
        oldest one has arrived."""
        posted = self.posted[channel]
        posted.append((dist.isend(x, rank, group=self.group, tag=channel), x))
        stages = 1 if channel == Channel.HIDDEN else self.size - 1
        if len(posted) > 4 * stages * (self.size + 1):
            posted.popleft()[0].wait()

    def close(self) -> None:
        for posted in self.posted.values():
            while posted:
                posted.popleft()[0].wait()
        self.sums, self.mail = COLLECTIVES, None  # gives back memory that ranks share
        dist.destroy_process_group()
