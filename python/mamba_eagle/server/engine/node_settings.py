"""Settings of several nodes: where node 0 is, and the secret that its agents prove."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import zmq
from zmq.utils import z85

from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.core import shown
from mamba_eagle.message.link import FIXED_PORTS, CurvePair

KEY_VARIABLE = "MAMBA_EAGLE_CLUSTER_KEY"
MIN_KEY_LENGTH = 16
MAKE_ONE = "make one by: openssl rand -hex 32"
# scrypt's cost: 16 MiB and some 50 ms for each guess at a weak key.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**14, 8, 1
SALT = b"mamba-eagle cluster key 1"


class Address(NamedTuple):
    host: str
    port: int


class ClusterKeys(NamedTuple):
    """The long-term key pairs of CURVE, which all nodes derive from the same secret."""

    first: CurvePair  # node 0's
    others: CurvePair  # that of all other nodes

    @staticmethod
    def derive(key: str) -> ClusterKeys:
        """scrypt (RFC 7914) makes a master key, and HKDF-Expand (RFC 5869) one secret key for each
        side."""
        master = hashlib.scrypt(
            key.encode(), salt=SALT, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, dklen=32
        )
        return ClusterKeys(_pair(master, b"node 0"), _pair(master, b"other nodes"))


def _pair(master: bytes, use: bytes) -> CurvePair:
    secret = z85.encode(hmac.digest(master, use + b"\x01", "sha256"))
    return CurvePair(zmq.curve_public(secret).decode(), secret.decode())


def node_problems(config: ServerConfig) -> list[str]:
    """What is wrong with the settings of several nodes."""
    problems = []
    if not 0 <= config.node_rank < max(config.nnodes, 1):
        problems.append(
            f"--node-rank {config.node_rank}: must be 0 to {config.nnodes - 1} with --nnodes "
            f"{config.nnodes}"
        )
    if config.nnodes <= 1:  # the others are of no use then, but scripts for any number give them
        return problems
    for check in (init_address, cluster_key):
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
    return problems


def init_address(config: ServerConfig) -> Address:
    """Of node 0.

    Raises: ConfigError
    """
    text = config.dist_init_addr
    if not text:
        raise ConfigError(
            [f"--nnodes {config.nnodes} needs --dist-init-addr HOST:PORT, the address of node 0"]
        )
    flag = f"--dist-init-addr {shown(text)}"
    host, _, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not digits.isdecimal():
        raise ConfigError([f"{flag}: must be HOST:PORT, as in 10.0.0.1:5000 or [fd00::1]:5000"])
    last = int(digits) + FIXED_PORTS + config.num_ranks - config.ranks_per_node - 1
    if int(digits) == 0 or last > 65535:
        raise ConfigError([f"{flag}: ports {digits} to {last} are used: choose one that has room"])
    if _names_no_interface(host):
        raise ConfigError(
            [f"{flag}: would listen on all interfaces: name node 0's address on one of them"]
        )
    return Address(host, int(digits))


def _names_no_interface(host: str) -> bool:
    if host == "*":
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def init_address_in_numbers(config: ServerConfig) -> Address:
    """Of node 0, as this machine knows its name; of IPv4, if there is one.

    Raises: ConfigError if the name is not known.
    """
    host, port = init_address(config)
    flag = f"--dist-init-addr {shown(config.dist_init_addr)}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError([f"{flag}: {error.strerror or error}"]) from None
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    numbers = str(found[0][4][0])
    if _names_no_interface(numbers):
        raise ConfigError([f"{flag}: {numbers} is not the address of one interface"])
    return Address(numbers, port)


def loopback_warning(config: ServerConfig) -> str | None:
    """Whether node 0 knows its own name, but by an address that others cannot reach."""
    host, numbers = init_address(config).host, init_address_in_numbers(config).host
    if host == numbers or not ipaddress.ip_address(numbers.partition("%")[0]).is_loopback:
        return None
    return (
        f"--dist-init-addr {shown(config.dist_init_addr)} is {numbers} on this machine (see "
        "/etc/hosts), which others cannot reach: give an address in numbers"
    )


def cluster_key(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The flag's, the file's, or the environment's, the first that there is.

    Raises: ConfigError
    """
    key, source = config.cluster_key, "--cluster-key"
    if not key and config.cluster_key_file:
        key, source = (
            _key_in(config.cluster_key_file),
            f"--cluster-key-file {config.cluster_key_file}",
        )
    if not key and KEY_VARIABLE in environment:
        key, source = environment[KEY_VARIABLE].strip(), KEY_VARIABLE
    if not key:
        raise ConfigError(
            [
                f"--nnodes {config.nnodes} needs a secret that all nodes share: give "
                f"--cluster-key-file, or set {KEY_VARIABLE}; {MAKE_ONE}"
            ]
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            [f"{source}: the key has fewer than {MIN_KEY_LENGTH} characters; {MAKE_ONE}"]
        )
    return key


def _key_in(path: str) -> str:
    """Raises: ConfigError for a file that cannot be read, or is empty."""
    flag = f"--cluster-key-file {path}"
    try:
        with open(path, encoding="utf-8") as file:
            key = file.read().strip()
    except OSError as error:
        raise ConfigError([f"{flag}: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{flag}: is not text in UTF-8"]) from None
    if not key:
        raise ConfigError([f"{flag}: is empty; {MAKE_ONE}"])
    return key
