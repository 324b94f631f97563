"""Chooses the network interface for gloo and NCCL (`--socket-ifname`).

Without it, both choose one themselves: gloo uses the interface of the host's name, which may be the loopback or a
management network. `auto` chooses the interface that leads to the worker store's node, in each round. That node's
address comes from the control plane, so it is on the network of the rendezvous endpoint.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.options import interface_names
from rallypoint.base.endpoint import Endpoint, is_loopback, outward_address, source_address
from rallypoint.base.log import get_logger
from rallypoint.base.netlink import Interface, interfaces

if TYPE_CHECKING:
    from rallypoint.agent.spec import VariableSource, Worker
    from rallypoint.features.round_setup import RoundInSetup

log = get_logger(__name__)

AUTO = "auto"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_TIMEOUT = 60.0
"""Seconds to resolve the name of the worker store's node."""


class SocketIfname(Feature):
    """Sets the interface for each round's workers."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        asked = self.workers.group.spec.features.frameworks.socket_ifname
        self._choice = InterfaceChoice(interface_names(asked))
        if asked == AUTO:
            from rallypoint.features.round_setup import RoundSetup

            RoundSetup.of(self.workers).steps.insert(0, self._choice)

    def variables(self) -> Iterable[VariableSource]:
        return (self._choice,)


class Choice(NamedTuple):
    """The interface for a round and this node's address on it, or a sentence that says why none was found.

    `others` are the other active interfaces, with one address each.
    """

    name: str = ""
    address: str = ""
    others: tuple[str, ...] = ()
    failure: str = ""


class InterfaceChoice:
    """Each round's interface: a `VariableSource`, and a `SetupStep` for `auto`.

    Args:
        asked: the flag's value.
    """

    names = frozenset({GLOO, NCCL})

    def __init__(self, asked: str) -> None:
        self._chosen = "" if asked == AUTO else asked
        self._logged = Choice()
        self._found: dict[RoundInSetup, Choice] = {}
        """The choices of the rounds' threads."""

    def variables(self, worker: Worker, environment: Mapping[str, str]) -> Mapping[str, str]:
        """See `VariableSource`. The user's settings take precedence."""
        wanted = {GLOO: self._chosen, NCCL: f"={self._chosen}"}  # NCCL matches prefixes without "="
        return {name: value for name, value in wanted.items() if not os.environ.get(name)}

    def begin(self, round_: RoundInSetup) -> bool:
        self._found.clear()
        return True

    def run(self, round_: RoundInSetup) -> None:
        round_.limit(_TIMEOUT)
        self._found[round_] = _find(round_.place.store_address, round_.place.group_world_size)

    def missed(self, round_: RoundInSetup, why: str) -> None:
        self._found[round_] = Choice(failure=why)

    def sentence(self, round_: RoundInSetup, why: str) -> str:
        return _failure(f"{round_.place.store_address} could not be resolved ({why})")

    def take(self, round_: RoundInSetup) -> None:
        from rallypoint.features.round_setup import Unprepared

        found = self._found.pop(round_, Choice())
        self._chosen = found.name
        if found.failure:
            raise Unprepared(found.failure)
        if found.name and found != self._logged:
            self._logged = found
            (log.warning if found.others else log.info)("%s", sentence(found))

    def close(self) -> None:
        return


def _find(host: str, nodes: int) -> Choice:
    """Find the interface that leads to the worker store's node. Use a thread: resolving the name may take long."""
    try:
        source = source_address(Endpoint(host, 1))
        # On the store's node, its own name may resolve to the loopback, which no other node can reach.
        if is_loopback(source) and not is_loopback(host) and host != "localhost" and nodes > 1:
            source = outward_address()
        return choose(interfaces(), source)
    except OSError as error:
        return Choice(failure=_failure(f"no interface leads to {host} ({error.strerror or error})"))


def choose(there: Sequence[Interface], source: str) -> Choice:
    """Choose the interface with this address. Pure.

    Args:
        there: the active interfaces.
        source: this node's address on the route to the others.
    """
    holders = [interface for interface in there if source in interface.addresses]
    if not holders:
        return Choice(failure=_failure(f"no interface that is up has this node's address {source}"))
    chosen = min(holders, key=lambda interface: interface.is_loopback and not is_loopback(source))
    if is_loopback(source):  # all nodes are on this machine
        return Choice(chosen.name, source)
    others = [
        interface
        for interface in there
        if interface is not chosen and not interface.is_loopback and interface.addresses
    ]
    return Choice(chosen.name, source, tuple(f"{interface.name} ({interface.addresses[0]})" for interface in others))


def sentence(found: Choice) -> str:
    """Describe the choice and the alternatives in a sentence."""
    text = f"--socket-ifname={AUTO}: {found.name} ({found.address}) leads to the other nodes"
    if not found.others:
        return text
    which = "is" if len(found.others) == 1 else "are"
    return f"{text}; {', '.join(found.others)} {which} up too; set --socket-ifname=NAME to use another interface"


def _failure(why: str) -> str:
    return (
        f"{socket.gethostname()} has no interface for --socket-ifname={AUTO}: {why}; set the name of an interface "
        "instead"
    )
