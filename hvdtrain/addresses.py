"""The IP addresses of this host, and the one by which other hosts reach it."""

import ipaddress
import itertools
import os
import socket
from collections.abc import Mapping, Sequence

import psutil

LOOPBACK = "127.0.0.1"
# Gloo's variable names one interface, Open MPI's a list of interfaces or networks.
GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
NETWORK_VARIABLES = (GLOO_INTERFACE, "OMPI_MCA_btl_tcp_if_include")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# Addresses that are reserved for documentation (RFC 5737 and 3849), which no interface
# has: packets to them take the default route.
_REMOTE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def by_interface() -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up, IPv4 first.

    An address with a scope, fe80::1%eth0, is left out: other hosts cannot use it.
    """
    running = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {
        name: [
            entry.address
            for family in _FAMILIES
            for entry in entries
            if entry.family == family and "%" not in entry.address
        ]
        for name, entries in psutil.net_if_addrs().items()
        # A label such as eth0:1 is of an address, not of an interface.
        if name.partition(":")[0] in running
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def listed() -> str:
    """Return the network interfaces with their addresses, for messages."""
    named = (f"{name} {' '.join(each)}" for name, each in by_interface().items())
    return ", ".join(named) or "none"


def interface_of(address: str) -> str:
    """Return the name of the network interface of this host with this address.

    Raises:
        OSError: there is none.
    """
    for name, addresses in by_interface().items():
        if address in addresses:
            return name
    raise OSError(
        f"{socket.gethostname()} has no network interface with the address {address}: "
        f"its interfaces are {listed()}"
    )


def outer_ipv4() -> list[str]:
    """Return the IPv4 addresses of all interfaces but the loopback."""
    return [address for address in _outer(by_interface()) if ":" not in address]


def resolve(name: str) -> list[str]:
    """Return the addresses of a name.

    Raises:
        OSError: it has none.
    """
    # Each address once: by default, there is one for each type of socket.
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


def is_of_this_host(name: str) -> bool:
    """Return whether a name has an address of this host, such as Debian's 127.0.1.1."""
    own = [*itertools.chain(*by_interface().values())]
    return any(
        address in own or ipaddress.ip_address(address).is_loopback
        for address in _resolved_or_none(name)
    )


def resolution(name: str) -> str:
    """Return to what a name resolves on this host, for messages."""
    try:
        return f"{name} resolves to {' and '.join(resolve(name))}"
    except OSError as error:
        return f"{name} has no address ({error.strerror})"


def reached_by_others() -> str:
    """Return the address by which other hosts reach this one.

    Where a variable of Gloo or Open MPI selects a network, it is an address there.
    Otherwise the first of these that is not one of the loopback: the address of the
    host's own name, if an interface has it; the source of the default route; an address
    of the only interface. A host without another interface has the loopback's.

    Raises:
        OSError: the selected network is not there, or there are several interfaces to
            choose from.
    """
    interfaces = by_interface()
    if chosen := next(filter(None, map(os.environ.get, NETWORK_VARIABLES)), ""):
        return _address_at(chosen.split(","), interfaces)
    outer = _outer(interfaces)
    if not outer:
        return LOOPBACK
    name = socket.gethostname()
    # Debian gives a host's own name an address of the loopback.
    for known in (_resolved_or_none(name), _routed(), _sole(interfaces)):
        for address in outer:
            if address in known:
                return address
    raise OSError(
        f"{name} has no address that other hosts are sure to reach: {resolution(name)},"
        f" there is no default route, and its interfaces are {listed()}. Correct the "
        f"name in the DNS or /etc/hosts, or set {GLOO_INTERFACE} to the interface of "
        "the job's network"
    )


def _outer(interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the addresses that are not of the loopback, IPv4 first."""
    found = itertools.chain(*interfaces.values())
    outer = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    return sorted(outer, key=lambda address: ":" in address)


def _resolved_or_none(name: str) -> list[str]:
    try:
        return resolve(name)
    except OSError:
        return []


def _routed() -> list[str]:
    """Return the addresses from which this host sends by its default routes."""
    found = []
    for family, remote in _REMOTE.items():
        with socket.socket(family, socket.SOCK_DGRAM) as made:
            try:
                # Sends nothing.
                made.connect((remote, 9))
            except OSError:
                continue
            found.append(made.getsockname()[0])
    return found


def _sole(interfaces: Mapping[str, Sequence[str]]) -> Sequence[str]:
    outer = [addresses for addresses in interfaces.values() if _outer({"": addresses})]
    return outer[0] if len(outer) == 1 else ()


def _address_at(
    networks: Sequence[str], interfaces: Mapping[str, Sequence[str]]
) -> str:
    """Return an address at the first interface or network that this host has.

    A network is written as 10.0.0.0/8.
    """
    for network in networks:
        for interface, addresses in interfaces.items():
            for address in addresses:
                if interface == network or _is_in(address, network):
                    return address
    raise OSError(
        f"{socket.gethostname()} has no address at the network interface "
        f"{' or '.join(networks)}: its interfaces are {listed()}. Correct "
        f"{' or '.join(filter(os.environ.get, NETWORK_VARIABLES))}"
    )


def _is_in(address: str, network: str) -> bool:
    if "/" not in network:
        return False
    try:
        members = ipaddress.ip_network(network, strict=False)
    except ValueError as error:
        raise OSError(str(error)) from None
    return ipaddress.ip_address(address) in members
