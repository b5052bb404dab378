"""Addresses: of this machine, and as text."""

import os

import pytest

from megatron_hacpo.process import network
from megatron_hacpo.process.network import (
    interface_of,
    joined,
    own_address,
    separated,
    use_interface_towards,
)
from megatron_hacpo.process.store import store_address


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HACPO_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("host, port, text", [("10.0.0.1", 5, "10.0.0.1:5"), ("fd00::1", 80, "[fd00::1]:80")])
def test_host_and_port_as_text(host: str, port: int, text: str) -> None:
    assert joined(host, port) == text
    assert separated(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:x"])
def test_what_is_no_host_and_port(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert separated(text) is None
    monkeypatch.setenv("HACPO_STORE", text)
    with pytest.raises(ValueError, match=f"HACPO_STORE: '{text}' is not HOST:PORT"):
        store_address()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_on_the_way_to_this_machine(address: str) -> None:
    assert own_address(address) == address
    assert interface_of(address) == "lo"


def test_a_host_without_address() -> None:
    with pytest.raises(ValueError, match=r"no-such-host.invalid: has no address here"):
        own_address("no-such-host.invalid")


def test_an_interface_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HACPO_INTERFACE", "lo")
    assert own_address("192.0.2.1") == "127.0.0.1"
    monkeypatch.setenv("HACPO_INTERFACE", "nosuch0")
    with pytest.raises(ValueError, match=r"HACPO_INTERFACE: nosuch0: .* has no such interface; it has .*lo"):
        own_address("192.0.2.1")


def test_gloo_is_told_the_interface_unless_the_environment_says_one(monkeypatch: pytest.MonkeyPatch) -> None:
    use_interface_towards("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "processes of one machine find each other"
    monkeypatch.setattr(network, "own_address", lambda towards: "192.0.2.7")
    monkeypatch.setattr(network, "interface_of", lambda address: "eth7")
    use_interface_towards("node2")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "NCCL finds the fast one"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("HACPO_INTERFACE", "eth7")
    use_interface_towards("node2")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("mine", "eth7")
    del os.environ["NCCL_SOCKET_IFNAME"]
