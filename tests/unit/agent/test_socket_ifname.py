"""The interface for workers: the choice, missing names, and the user's own settings."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping

import pytest

from rallypoint.agent.options import interface_names
from rallypoint.agent.workers import worker_environment
from rallypoint.base.errors import UserError
from rallypoint.base.kernel import until_readable
from rallypoint.base.mailbox import Background
from rallypoint.base.netlink import Interface, interface_addresses, interfaces
from rallypoint.control.membership.state import NodeRanks
from rallypoint.control.protocol.messages import Placement
from rallypoint.features.socket_ifname import Choice, choose
from tests.unit.agent.features import enter_round, with_features
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.agent.thread_workers import ThreadWorkers

LO = Interface("lo", True, ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", False, ("10.0.0.2", "2001:db8::2"))
ETH1 = Interface("eth1", False, ("192.168.0.2",))
BARE = Interface("eth2", False, ())


@pytest.mark.parametrize(
    ("there", "source", "chosen"),
    [
        ([LO, ETH0, BARE], "10.0.0.2", Choice("eth0", "10.0.0.2")),
        ([LO, ETH0, ETH1], "192.168.0.2", Choice("eth1", "192.168.0.2", ("eth0 (10.0.0.2)",))),
        ([LO, ETH0, ETH1], "2001:db8::2", Choice("eth0", "2001:db8::2", ("eth1 (192.168.0.2)",))),
        ([LO, ETH0, ETH1], "127.0.0.1", Choice("lo", "127.0.0.1")),
        ([LO._replace(addresses=("10.0.0.2",)), ETH0], "10.0.0.2", Choice("eth0", "10.0.0.2")),
    ],
)
def test_the_one_that_has_the_address(there: list[Interface], source: str, chosen: Choice) -> None:
    assert choose(there, source) == chosen


def test_no_interface_has_it() -> None:
    failure = choose([LO, ETH0], "10.9.9.9").failure
    assert failure.startswith(socket.gethostname())
    assert "no interface that is up has this node's address 10.9.9.9" in failure


def test_names_that_are_not_there() -> None:
    assert interface_names("auto") == "auto"
    assert interface_names("lo") == "lo"
    for text in ("eth99", "lo,", "lo, lo", "Auto"):
        with pytest.raises(UserError, match=" is not a network interface on this machine; use auto, or one or more of"):
            interface_names(text)


def test_the_kernels_interfaces() -> None:
    """As the C library and the other reader know them."""
    found = interfaces()
    assert {each.name for each in found} <= {name for _, name in socket.if_nameindex()}
    (loopback,) = [each for each in found if each.name == "lo"]
    assert loopback.is_loopback
    assert "127.0.0.1" in loopback.addresses
    own = {address for each in found if not each.is_loopback for address in each.addresses}
    assert {each for each in interface_addresses() or () if "/" not in each} <= own


# In an agent


def given(asked: str, host: str = "127.0.0.1") -> tuple[Mapping[str, str], str]:
    """What a worker gets, and the failure if there is one; the agent's loop is played."""
    workers = ThreadWorkers(lambda rank, start, stopping: rank)
    with_features(workers, socket_ifname=asked)
    enter_round(workers, Placement(0, 0, 2, NodeRanks(0, 2, 0, 2), host, 1, 0))
    deadline = time.monotonic() + TIMEOUT
    while workers.preparations.preparing():
        assert time.monotonic() < deadline
        (search,) = workers.preparations
        until_readable(search.fds(), deadline - time.monotonic())
        search.step()
    failed = workers.preparations.failed()
    failure = failed.failure if failed else ""
    environment = worker_environment(workers.group, workers.group.workers[0], {}, os.environ)
    workers.close()
    return {name: value for name, value in environment.items() if "IFNAME" in name}, failure


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_where_all_nodes_are_here_it_is_the_loopback(host: str) -> None:
    assert given("auto", host) == ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}, "")


def test_what_the_user_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    assert given("lo")[0] == {"NCCL_SOCKET_IFNAME": "=lo"}


def test_a_name_that_is_not_resolved_is_a_failure() -> None:
    found, failure = given("auto", "nobody.invalid")
    assert "no interface leads to nobody.invalid" in failure
    assert "set the name of an interface instead" in failure
    assert found["GLOO_SOCKET_IFNAME"] == ""


def test_the_result_of_work_that_was_replaced_is_forgotten() -> None:
    work, told = Background[str]("work"), threading.Event()
    work.start(lambda: "first" if told.wait(TIMEOUT) else "")
    work.start(lambda: "second")
    told.set()
    deadline = time.monotonic() + TIMEOUT
    found = None
    while found is None:
        assert time.monotonic() < deadline
        until_readable(work.fds(), deadline - time.monotonic())
        found = work.take_result()
    assert found == "second"
    assert not work.busy
    work.forget()
    assert work.take_result() is None
    work.close()
