"""Requests to engine ranks and their answers across hosts, by a TCPStore on trainer rank 0.

SGLang's HTTP answers carry no data from a custom weight loader, and tensors shared through memory
reach one host only. The store itself refuses a message above 32 MiB.
"""

import json
import socket
import uuid
import zlib
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.system.processes import route_address


class Mailbox:
    """Stores messages at trainer rank 0, which listens at `address` only. `timeout_s` bounds every
    wait."""

    def __init__(self, address: str, timeout_s: float):
        self.address = address
        self.store = listening_store(address, timeout_s)
        self.port = self.store.port

    def new_key(self, what: str) -> str:
        """Returns a key for one message about `what`."""
        return f"{what}/{uuid.uuid4().hex}"  # secret: only its receiver can answer

    def put(self, what: str, message: object) -> str:
        """Stores a message until its key is deleted. Returns the key."""
        key = self.new_key(what)
        self.store.set(key, encode(message))  # type: ignore[arg-type]  # takes bytes; torch's stub says str
        return key

    def take(self, key: str, timeout_s: float) -> Any:
        """Returns the message under `key` and forgets it. Raises torch.distributed.DistStoreError
        if none comes."""
        self.store.wait([key], timedelta(seconds=timeout_s))
        message = decode(self.store.get(key))
        self.store.delete_key(key)
        return message


def listening_store(address: str, timeout_s: float) -> TCPStore:
    """Opens a store that listens at `address` only; torch's default is every interface."""
    listener = socket.create_server((address, 0), backlog=1024)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def encode(message: object) -> bytes:
    """Returns a message that JSON can express as compressed bytes."""
    return zlib.compress(json.dumps(message).encode(), 1)


def decode(data: bytes) -> Any:
    """Returns the message that `encode` was given; tuples come back as lists."""
    return json.loads(zlib.decompress(data))


def address_towards(url: str) -> str:
    """Returns this host's address as the host of `url` reaches it."""
    parts = urlsplit(url)
    return route_address(str(parts.hostname), parts.port or 80)
