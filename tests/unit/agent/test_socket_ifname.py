"""The interface for workers: the choice, unknown names, and the user's own settings."""

from __future__ import annotations

import os
import socket
import threading
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
from tests.unit.agent.features import enter_round, finish, with_features
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.waiting import until

LO = Interface("lo", True, ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", False, ("10.0.0.2", "2001:db8::2"))
ETH1 = Interface("eth1", False, ("192.168.0.2",))
BARE = Interface("eth2", False, ())


@pytest.mark.parametrize(
    ("found", "source", "chosen"),
    [
        ([LO, ETH0, BARE], "10.0.0.2", Choice("eth0", "10.0.0.2")),
        ([LO, ETH0, ETH1], "192.168.0.2", Choice("eth1", "192.168.0.2", ("eth0 (10.0.0.2)",))),
        ([LO, ETH0, ETH1], "2001:db8::2", Choice("eth0", "2001:db8::2", ("eth1 (192.168.0.2)",))),
        ([LO, ETH0, ETH1], "127.0.0.1", Choice("lo", "127.0.0.1")),
        ([LO._replace(addresses=("10.0.0.2",)), ETH0], "10.0.0.2", Choice("eth0", "10.0.0.2")),
    ],
)
def test_choose(found: list[Interface], source: str, chosen: Choice) -> None:
    assert choose(found, source) == chosen
    failure = choose(found, "10.9.9.9").failure
    assert failure.startswith(socket.gethostname())
    assert "no interface that is up has this node's address 10.9.9.9" in failure


@pytest.mark.parametrize("text", ["eth99", "lo,", "lo, lo", "Auto"])
def test_interface_names(text: str) -> None:
    assert interface_names("auto") == "auto"
    assert interface_names("lo") == "lo"
    with pytest.raises(UserError, match=" is not a network interface on this machine; use auto, or one or more of"):
        interface_names(text)


def test_interfaces_of_the_kernel() -> None:
    """Compared with the C library and the other reader."""
    found = {interface.name: interface for interface in interfaces()}
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    assert found["lo"].is_loopback
    assert "127.0.0.1" in found["lo"].addresses
    own = {address for interface in found.values() if not interface.is_loopback for address in interface.addresses}
    assert {address for address in interface_addresses() or () if "/" not in address} <= own


def names_for(asked: str, host: str = "127.0.0.1") -> tuple[Mapping[str, str], str]:
    """The variables of a worker, and the failure; the test plays the agent's loop."""
    workers = ThreadWorkers(lambda rank, start, stopping: rank)
    with_features(workers, socket_ifname=asked)
    enter_round(workers, Placement(0, 0, 2, NodeRanks(0, 2, 0, 2), host, 1, 0))
    finish(*workers.preparations)
    failed = workers.preparations.failed()
    failure = failed.failure if failed else ""
    environment = worker_environment(workers.group, workers.group.workers[0], {}, os.environ)
    workers.close()
    return {name: value for name, value in environment.items() if "IFNAME" in name}, failure


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_loopback_for_nodes_of_one_host(host: str) -> None:
    assert names_for("auto", host) == ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}, "")


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    assert names_for("lo")[0] == {"NCCL_SOCKET_IFNAME": "=lo"}


def test_unknown_hosts_are_a_failure() -> None:
    found, failure = names_for("auto", "nobody.invalid")
    assert "no interface leads to nobody.invalid" in failure
    assert "set the name of an interface instead" in failure
    assert found["GLOO_SOCKET_IFNAME"] == ""


def test_results_of_replaced_work_are_dropped() -> None:
    work, go_on = Background[str]("work"), threading.Event()

    def result() -> str | None:
        until_readable(work.fds(), TIMEOUT)
        return work.take_result()

    work.start(lambda: "first" if go_on.wait(TIMEOUT) else "")
    work.start(lambda: "second")
    go_on.set()
    assert until(result) == "second"
    assert not work.busy
    work.forget()
    assert work.take_result() is None
    work.close()
