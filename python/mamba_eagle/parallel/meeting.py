"""Where ranks find each other, and which network interface they then use."""

import datetime
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch.distributed as dist

# gloo's and NCCL's variables. Who has set them knows the network better.
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
BACKLOG = 4096


class Meeting(ABC):
    """The same for all ranks of a server, and for them alone."""

    @abstractmethod
    def store(self, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
        """torch's store, in which ranks leave each other their addresses."""

    @abstractmethod
    def name_interface(self) -> None:
        """Keeps gloo and NCCL to one network interface."""


class FileMeeting(Meeting):
    """Ranks of one machine meet at a file in a folder that only their user can read; gloo's and
    NCCL's own connections stay on the loopback interface."""

    def __init__(self, path: str) -> None:
        """path: where there is no file yet."""
        self.path = path

    def store(self, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
        return dist.FileStore(self.path, size)

    def name_interface(self) -> None:
        if sys.platform == "linux":
            os.environ.setdefault(GLOO_INTERFACE, "lo")
            os.environ.setdefault(NCCL_INTERFACE, "=lo")


class StoreMeeting(Meeting):
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
