"""Test hosts on this machine: network namespaces with an address of their own on one bridge, and links that can be cut.

They share the file system and the processors; names resolve through a hosts file of each. Needs root and iproute2.
"""

import os
import shutil
import subprocess
from pathlib import Path

NEEDED = "network namespaces need root and iproute2"
_ETC = Path("/etc/netns")  # `ip netns exec` mounts what lies in its folder over /etc


def available() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"mgtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


class Hosts:
    """host1 ... hostN at `address(1)` ... `address(N)`; a context manager. The interface is eth0 on each."""

    def __init__(self, count: int):
        self.count, self._tag = count, f"mg{os.getpid() % 10_000}"
        used = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True).stdout
        self._network = next(f"10.77.{i}" for i in range(1, 250) if f"10.77.{i}." not in used)

    def address(self, number: int) -> str:
        return f"{self._network}.{number}"

    def __enter__(self) -> "Hosts":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge", "forward_delay", "0")
        _ip("addr", "add", f"{self._network}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        names = "".join(f"{self.address(i)} host{i}\n" for i in range(1, self.count + 1))
        for i in range(1, self.count + 1):
            namespace, folder = self._namespace(i), _ETC / self._namespace(i)
            folder.mkdir(parents=True)
            own = f"127.0.0.1 localhost\n127.0.1.1 host{i}\n"  # as Debian and cloud images write it
            (folder / "hosts").write_text(own + names)
            # Names come from that file alone: else every reverse look-up waits 10 s for a name server out of reach.
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            _ip("netns", "add", namespace)
            _ip("link", "add", self._link(i), "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", self._link(i), "master", self._bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", device, "up")

    def __exit__(self, *exc_info) -> None:
        for i in range(1, self.count + 1):
            for words in (("link", "del", self._link(i)), ("netns", "del", self._namespace(i))):
                subprocess.run(["ip", *words], capture_output=True)
            shutil.rmtree(_ETC / self._namespace(i), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def command(self, number: int, command: list[str]) -> list[str]:
        """The same command, run on that host under its name, with shared memory of its own: SGLang takes processes that
        share some for processes of one machine, which talk over loopback."""
        script = 'hostname "$0"; mount -t tmpfs shm /dev/shm; exec "$@"'
        rename = ["unshare", "--uts", "sh", "-c", script, f"host{number}"]
        return ["ip", "netns", "exec", self._namespace(number), *rename, *command]

    def cut(self, number: int) -> None:
        """Packets from and to that host are lost, as by a broken switch port, without a notice."""
        _ip("link", "set", self._link(number), "nomaster")

    def heal(self, number: int) -> None:
        _ip("link", "set", self._link(number), "master", self._bridge)

    @property
    def _bridge(self) -> str:
        return f"{self._tag}-br"

    def _namespace(self, number: int) -> str:
        return f"{self._tag}-host{number}"

    def _link(self, number: int) -> str:
        return f"{self._tag}-v{number}"
