"""The addresses of this machine's interfaces, beside those that `ip` shows."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from rallypoint.base import netlink as interfaces
from rallypoint.base.endpoint import is_local_address
from rallypoint.base.netlink import interface_addresses
from tests.processes import completed


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs `ip` (Debian: apt-get install iproute2)")
def test_they_are_those_that_ip_shows() -> None:
    shown = json.loads(completed(["ip", "-j", "address"], check=True).stdout)
    expected = {
        f"{each['local']}/64" if each.get("temporary") else each["local"]
        for link in shown
        if "UP" in link["flags"]
        for each in link["addr_info"]
        if not each["local"].startswith("127.")
        and each["local"] != "::1"
        and not (each["family"] == "inet6" and each["scope"] == "link")
    }
    found = interface_addresses()
    assert found is not None
    assert set(found) == expected
    assert all(is_local_address(each.partition("/")[0]) for each in found)


def test_where_the_kernel_does_not_say_they_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_arguments: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", denied)
    assert interface_addresses() is None


def test_a_machine_with_too_many_counts_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "MAX_ADDRESSES", -1)
    assert interface_addresses() is None
