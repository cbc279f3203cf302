"""By which address other hosts reach this one, whatever its name resolves to."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from hvdtrain import addresses

LO = ("lo", "127.0.0.1", "::1")
ETH0 = ("eth0", "10.77.0.4", "fd00::4", "fe80::4%eth0")
ETH0_IPV6 = ("eth0", "fd00::4", "fe80::4%eth0")
IB0 = ("ib0", "10.88.0.4")


@pytest.fixture
def make_host(monkeypatch):
    """Return `make_host(*interfaces, named=(), routed=())`, which fakes this host."""

    def make_host(*interfaces, named=(), routed=()):
        entries = {
            name: [
                SimpleNamespace(
                    family=socket.AF_INET6 if ":" in each else socket.AF_INET,
                    address=each,
                )
                for each in reversed(found)
            ]
            for name, *found in interfaces
        }
        # Linux knows no labels here.
        running = {
            name: SimpleNamespace(isup=name != "down0")
            for name in entries
            if ":" not in name
        }
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: running)
        monkeypatch.setattr(socket, "gethostname", lambda: "pod4")
        monkeypatch.setattr(addresses, "_routed", lambda: list(routed))

        def getaddrinfo(name, *args, **kwargs):
            assert name == "pod4"
            if not named:
                raise socket.gaierror(-2, "Name or service not known")
            return [(None, None, None, "", (address, 0)) for address in named]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        for variable in addresses.NETWORK_VARIABLES:
            monkeypatch.delenv(variable, raising=False)

    return make_host


@pytest.mark.parametrize(
    ("interfaces", "named", "routed", "expected"),
    [
        # The name decides between interfaces, before the default route.
        ([LO, ETH0, IB0], ["10.88.0.4"], ["10.77.0.4"], "10.88.0.4"),
        # It is missing, another host's, or the loopback's, as Debian's 127.0.1.1.
        ([LO, ETH0, IB0], [], ["10.88.0.4"], "10.88.0.4"),
        ([LO, ETH0, IB0], ["10.9.9.9"], ["10.88.0.4"], "10.88.0.4"),
        ([LO, ETH0, IB0], ["127.0.1.1"], ["10.88.0.4"], "10.88.0.4"),
        ([LO, ETH0, IB0], ["::1", "127.0.0.1"], ["10.88.0.4"], "10.88.0.4"),
        ([LO, ETH0], ["::1", "10.77.0.4"], [], "10.77.0.4"),
        # IPv4 comes first, and an interface that is not up does not count.
        ([LO, ETH0], ["fd00::4", "10.77.0.4"], [], "10.77.0.4"),
        ([LO, ETH0_IPV6], ["fd00::4"], [], "fd00::4"),
        ([LO, ETH0_IPV6], [], ["fd00::4"], "fd00::4"),
        ([LO, ETH0, ("down0", "10.66.0.4")], ["127.0.1.1"], [], "10.77.0.4"),
        ([LO], [], [], "127.0.0.1"),
    ],
)
def test_the_address_for_other_hosts(make_host, interfaces, named, routed, expected):
    make_host(*interfaces, named=named, routed=routed)
    assert addresses.reached_by_others() == expected


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HOROVOD_GLOO_IFACE", "ib0", "10.88.0.4"),
        ("OMPI_MCA_btl_tcp_if_include", "eth9,10.88.0.0/16", "10.88.0.4"),
        ("OMPI_MCA_btl_tcp_if_include", "fd00::/8", "fd00::4"),
        ("OMPI_MCA_btl_tcp_if_include", "lo", "127.0.0.1"),
    ],
)
def test_a_network_that_is_selected_decides(
    make_host, monkeypatch, variable, value, expected
):
    make_host(LO, ETH0, IB0, named=["10.77.0.4"])
    monkeypatch.setenv(variable, value)
    assert addresses.reached_by_others() == expected


def test_a_choice_between_interfaces_is_one_line(make_host):
    make_host(LO, ETH0, IB0, named=["127.0.1.1"])
    with pytest.raises(OSError, match=r"pod4 resolves to 127\.0\.1\.1, ") as error:
        addresses.reached_by_others()
    text = str(error.value)
    assert "lo 127.0.0.1 ::1, eth0 10.77.0.4 fd00::4, ib0 10.88.0.4. Correct" in text
    assert "set HOROVOD_GLOO_IFACE" in text
    make_host(LO, ETH0, IB0)
    with pytest.raises(OSError, match=r"pod4 has no address \(Name or service not"):
        addresses.reached_by_others()


@pytest.mark.parametrize("value", ["eth9", "10.9.0.0/16", "10.9.0.0/99"])
def test_a_network_that_is_not_here_is_one_line(make_host, monkeypatch, value):
    make_host(LO, ETH0)
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", value)
    with pytest.raises(OSError, match=value):
        addresses.reached_by_others()


def test_the_interface_of_an_address(make_host):
    make_host(LO, ETH0, ("eth0:1", "10.99.0.4"))
    assert addresses.interface_of("fd00::4") == "eth0"
    assert addresses.interface_of("10.99.0.4") == "eth0:1"
    assert addresses.outer_ipv4() == ["10.77.0.4", "10.99.0.4"]
    with pytest.raises(OSError, match="pod4 has no network interface with the address"):
        addresses.interface_of("10.9.9.9")
