"""Resolves `rollout.host` to an address of this machine and its network interface."""

import socket
import sys
from contextlib import suppress
from importlib import import_module
from itertools import chain

import psutil

from megagrpo.system.processes import route_address

LOOPBACK = ("127.0.0.1", "localhost", "lo")
EVERYWHERE = "0.0.0.0"  # of IPv4, in which all services listen


def own_address(host: str) -> str:
    """Returns the address of this machine that `rollout.host` names, by address or by interface.

    Raises ValueError if it is neither.
    """
    if host in LOOPBACK:
        return "127.0.0.1"
    interfaces = _interfaces()
    if interfaces.get(host):
        return interfaces[host][0]
    if host == EVERYWHERE or interface_of(host):
        return host
    raise ValueError(
        f"rollout.host {host} is no interface and no IPv4 address of "
        f"{socket.gethostname()}, which has {interfaces}"
    )


def reachable_host(address: str) -> str:
    """Returns the address at which other machines reach a service that listens on `address`
    here."""
    if address != EVERYWHERE:
        return address
    if "ray" in sys.modules:  # this process has joined a cluster, which knows this machine
        return import_module("ray.util").get_node_ip_address()
    with suppress(OSError):  # without a route to the internet
        return route_address("8.8.8.8", 53)
    own = chain.from_iterable(_interfaces().values())
    return next((each for each in own if not each.startswith("127.")), LOOPBACK[0])


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with that address."""
    return next((name for name, own in _interfaces().items() if address in own), None)


def _interfaces() -> dict[str, list[str]]:
    """Returns the IPv4 addresses of each network interface."""
    return {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
