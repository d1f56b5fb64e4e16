"""Questions to engine ranks and their answers, across hosts: a TCPStore on trainer rank 0 that every engine rank connects to.

SGLang's HTTP answers carry no data from a custom weight loader, and tensors shared through memory reach one host only.
Messages are JSON, compressed; the store itself refuses a value above 32 MiB.
"""

import json
import socket
import zlib
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import TCPStore


class Mailbox:
    """The end at trainer rank 0."""

    def __init__(self, timeout_s: float):
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        self.port = self.store.port
        self._count = 0

    def new_key(self, what: str) -> str:
        self._count += 1
        return f"{what}/{self._count}"

    def put(self, key: str, message) -> None:
        self.store.set(key, encode(message))

    def take(self, key: str, timeout_s: float):
        """The message under `key`, which is then forgotten. Raises torch.distributed.DistStoreError when none comes in time."""
        self.store.wait([key], timedelta(seconds=timeout_s))
        message = decode(self.store.get(key))
        self.store.delete_key(key)
        return message


def encode(message) -> bytes:
    return zlib.compress(json.dumps(message).encode(), 1)


def decode(data: bytes):
    return json.loads(zlib.decompress(data))


def address_towards(url: str) -> str:
    """This host's address as seen from the host of `url`: that of the interface which leads there."""
    parts = urlsplit(url)
    family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket: chooses a route, sends nothing
        return probe.getsockname()[0]
