"""Requests to engine ranks and their answers across hosts, by a TCPStore on trainer rank 0.

SGLang's HTTP answers have no data from a custom weight loader, and tensors in shared memory reach
only one host. The store refuses a message above 32 MiB. It has no authentication, so messages have
a MAC.
"""

import hmac
import json
import secrets
import socket
import zlib
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.system.processes import route_address
from megagrpo.weights.wire.engine_group import PeerLost

_MAC_BYTES = 64  # hexadecimal digits of a SHA-256

# The address and port of a store, and the secret that allows to write. It travels between trainer
# ranks, and in requests to engines, which demand the run's key.
Access = tuple[str, int, str]


class Mailbox:
    """Messages in `plain`, the store of trainer rank 0, between processes that have the secret.

    Others can list, read, overwrite and delete values of the store, but no rank accepts their
    values: a name is the MAC of a key, so it cannot be guessed, and a value begins with the MAC of
    its name and bytes. A key has only one message, so an old message cannot be used again.
    secret: None to make one.
    """

    def __init__(self, plain: TCPStore, secret: str | None = None):
        self.plain = plain  # for torch's process groups, without MACs
        self.access: Access = plain.host, plain.port, secret or secrets.token_hex(32)

    def new_key(self, subject: str) -> str:
        """Returns a key for one message."""
        return f"{subject}/{secrets.token_hex(16)}"

    def put(self, subject: str, message: object) -> str:
        """Stores a message until its key is deleted. Returns the key."""
        key = self.new_key(subject)
        self.set(key, message)
        return key

    def set(self, key: str, message: object = None) -> None:
        """Stores a message that JSON can express."""
        name = self._mac(key)
        data = encode(message)
        self.plain.set(name, self._mac(name, data).encode() + data)  # type: ignore[arg-type]  # takes bytes; torch's stub says str

    def get(self, key: str) -> Any:
        """Returns the message under `key`. Raises PeerLost if a process without the secret wrote
        it."""
        name = self._mac(key)
        value = self.plain.get(name)
        data = value[_MAC_BYTES:]
        if not hmac.compare_digest(value[:_MAC_BYTES], self._mac(name, data).encode()):
            raise PeerLost(
                f"a process without the run's secret has overwritten {key} in the store of trainer "
                "rank 0: let no stranger reach the ports of rollout.host, see docs/security.md"
            )
        return decode(data)

    def wait(self, key: str, timeout_s: float) -> None:
        """Waits until `key` has a message. Raises torch.distributed.DistStoreError if none comes.
        Meanwhile the connection serves no other thread."""
        self.plain.wait([self._mac(key)], timedelta(seconds=timeout_s))

    def has(self, *keys: str) -> bool:
        """Returns whether all `keys` have a message."""
        return self.plain.check([self._mac(key) for key in keys])

    def delete(self, key: str) -> None:
        """Forgets the message under `key`, if there is one."""
        self.plain.delete_key(self._mac(key))

    def _mac(self, text: str, data: bytes = b"") -> str:
        return hmac.digest(self.access[2].encode(), text.encode() + data, "sha256").hex()


def open_mailbox(access: Access, timeout_s: float) -> Mailbox:
    """Connects to the mailbox of trainer rank 0. timeout_s: of the connection and each request."""
    address, port, secret = access
    limit = timedelta(seconds=timeout_s)
    return Mailbox(TCPStore(address, port, wait_for_workers=False, timeout=limit), secret)


def listening_store(address: str, timeout_s: float) -> TCPStore:
    """Opens a store that listens only at `address`. torch's default is every interface."""
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
    """Inverts `encode`; tuples come back as lists."""
    return json.loads(zlib.decompress(data))


def address_towards(url: str) -> str:
    """Returns this host's address as the host of `url` reaches it."""
    parts = urlsplit(url)
    return route_address(str(parts.hostname), parts.port or 80)
