"""Whether nodes reach each other, over real sockets of this machine."""

import socket
import threading

import pytest
import torch.distributed as dist

from megatron_hacpo.doctor.reach import meet


def met(addresses: dict[str, str], silent: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """What each node finds; silent ones are waited for and never come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[str, dict[str, str]] = {}

    def run(name: str) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        found[name] = meet(own, name, list(addresses), addresses[name], 1.0)

    threads = [threading.Thread(target=run, args=(name,)) for name in addresses if name not in silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_nodes_meet_over_both_kinds_of_addresses() -> None:
    found = met({"a": "127.0.0.1", "b": "::1", "c": "127.0.0.1", "d": "localhost"})
    assert found == {name: {other: "" for other in "abcd" if other != name} for name in "abcd"}


def test_a_node_alone_has_nobody_to_meet() -> None:
    assert met({"a": "127.0.0.1"}) == {"a": {}}


def test_a_node_that_says_nothing_is_named_by_the_others() -> None:
    found = met({"a": "127.0.0.1", "b": "127.0.0.1", "c": "::1"}, silent=("c",))
    assert found["a"] == {"b": "", "c": "does not say within 1 s where it listens"}
    assert found["b"]["a"] == ""


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    found = met({"a": "127.0.0.1", "b": "192.0.2.1"})
    assert found["a"]["b"].startswith("cannot listen on 192.0.2.1 (")
    assert found["b"] == {"a": ""}


@pytest.mark.parametrize("answer", [b"somebody else\n", b""])
def test_who_answers_must_be_the_node(answer: bytes) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answering() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        threading.Thread(target=answering, daemon=True).start()
        store.set("doctor/reach/listens/b", f"127.0.0.1:{listener.getsockname()[1]}")
        store.set("doctor/reach/done/b", "")
        found = meet(store, "a", ["a", "b"], "127.0.0.1", 2.0)
    assert f"is answered by {answer.decode().strip() or 'nobody'}" in found["b"]


def test_a_closed_port_is_told() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("doctor/reach/listens/b", "127.0.0.1:1")
    store.set("doctor/reach/done/b", "")
    assert "127.0.0.1:1 cannot be reached (" in meet(store, "a", ["a", "b"], "127.0.0.1", 1.0)["b"]
