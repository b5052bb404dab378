"""The addresses of this machine that other machines of a run reach."""

import ipaddress
import os
import socket
from contextlib import suppress

INTERFACE = "HACPO_INTERFACE"
"""Environment variable: the network interface to use, where a machine has several."""


def own_address(towards: str) -> str:
    """This machine's address on the interface that `INTERFACE` names, else on the way to a host.

    towards: a name or an address. Raises ValueError for an interface that is not there or has no address,
    and for a host without one or without a way to it.
    """
    interface = os.environ.get(INTERFACE)
    if not interface:
        return _on_the_way_to(towards)
    import psutil

    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise ValueError(
            f"{INTERFACE}: {interface}: {socket.gethostname()} has no such interface; "
            f"it has {', '.join(sorted(interfaces))}"
        )
    found = {
        family: [a.address for a in interfaces[interface] if a.family == family and "%" not in a.address]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    addresses = found[socket.AF_INET] + found[socket.AF_INET6]
    if not addresses:
        raise ValueError(f"{INTERFACE}: {interface}: has no address on {socket.gethostname()}; take another")
    return addresses[0]


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with an address; None if no interface has it."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return name
    return None


def use_interface_towards(host: str) -> None:
    """Have gloo meet other machines on the interface that leads to `host`, unless the environment says where.

    By itself it takes the address that this machine's name has, which may be a loopback one.
    """
    address = own_address(host)
    if ipaddress.ip_address(address).is_loopback:
        return
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if interface := os.environ.get(INTERFACE):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def joined(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def separated(address: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT; None for what is no such thing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _on_the_way_to(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(
            f"{host}: has no address here ({error.strerror or error}); correct its name"
        ) from None
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    raise ValueError(
        f"{host}: no way leads there from {socket.gethostname()}; name an interface: {INTERFACE}"
    )
