"""Chooses the network interface for gloo and NCCL (`--socket-ifname`).

Otherwise both choose one themselves: gloo the one that the host's name resolves to, which may be the loopback or a
management network. `auto` is the one by which this node reaches the node of the worker store, looked up in each round:
that node's address is the one known from the control plane, on the network of the rendezvous endpoint.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rallypoint.agent.options import interface_names
from rallypoint.agent.sources import Preparation
from rallypoint.agent.spec import Worker, WorkerGroup
from rallypoint.agent.workers import WorkerController
from rallypoint.base.endpoint import Endpoint, is_loopback, outward_address, source_address
from rallypoint.base.interfaces import Interface, interfaces
from rallypoint.base.log import get_logger
from rallypoint.base.mailbox import Background

log = get_logger(__name__)

AUTO = "auto"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def add_socket_ifname(workers: WorkerController, asked: str) -> None:
    """Tell the workers of each round which interface to use.

    Args:
        workers: of an agent that has not run yet.
        asked: the value of the flag.

    Raises:
        UserError: an interface is not there.
    """
    made = InterfaceChoice(interface_names(asked))
    workers.group.variable_sources.append(made)
    if asked == AUTO:
        workers.add_preparation(made)


class Choice(NamedTuple):
    """The interface of a round and this node's address there, or the sentence that says why there is none.

    `others` are the other interfaces that are up, with one address each.
    """

    name: str = ""
    address: str = ""
    others: tuple[str, ...] = ()
    failure: str = ""


class InterfaceChoice(Preparation):
    """The interface of each round, and a `VariableSource`.

    Args:
        asked: the value of the flag.
    """

    names = frozenset({GLOO, NCCL})

    def __init__(self, asked: str) -> None:
        self._chosen = "" if asked == AUTO else asked
        self._search: Background[Choice] = Background("rallypoint-interface")
        self._logged = Choice()
        self.failure = ""

    def variables(self, worker: Worker, environment: Mapping[str, str]) -> Mapping[str, str]:
        """See `VariableSource`. What the user has set stands."""
        wanted = {GLOO: self._chosen, NCCL: f"={self._chosen}"}  # NCCL takes names as prefixes, unless "=" is given
        return {name: value for name, value in wanted.items() if not os.environ.get(name)}

    def begin(self, group: WorkerGroup) -> None:
        """Look for the interface of the round that the group has entered."""
        assert group.placement is not None
        self.failure = ""
        self._search.start(partial(_find, group.placement.store_address, group.placement.group_world_size))

    def preparing(self) -> bool:
        """Whether it has not been found yet."""
        return self._search.busy

    def fds(self) -> list[int]:
        return self._search.fds()

    def step(self) -> None:
        found = self._search.take()
        if found is None:
            return
        self._chosen, self.failure = found.name, found.failure
        if found.name and found != self._logged:
            self._logged = found
            (log.warning if found.others else log.info)("%s", sentence(found))

    def cancel(self) -> None:
        self.failure = ""
        self._search.forget()

    def close(self) -> None:
        self._search.close()


def _find(host: str, nodes: int) -> Choice:
    """The interface towards the node of the worker store. On a thread: resolving the name may take long."""
    try:
        source = source_address(Endpoint(host, 1))
        # If this is that node itself, its own name may resolve to the loopback, which no other node can reach.
        if is_loopback(source) and not is_loopback(host) and host != "localhost" and nodes > 1:
            source = outward_address()
        return choose(interfaces(), source)
    except OSError as error:
        return Choice(failure=_failure(f"no interface leads to {host} ({error.strerror or error})"))


def choose(there: Sequence[Interface], source: str) -> Choice:
    """The interface that has this address. Pure.

    Args:
        there: the interfaces that are up.
        source: the address of this node towards the others.
    """
    holders = [each for each in there if source in each.addresses]
    if not holders:
        return Choice(failure=_failure(f"no interface that is up has this node's address {source}"))
    chosen = min(holders, key=lambda each: each.is_loopback and not is_loopback(source))
    if is_loopback(source):  # all nodes are on this machine
        return Choice(chosen.name, source)
    others = [each for each in there if each is not chosen and not each.is_loopback and each.addresses]
    return Choice(chosen.name, source, tuple(f"{each.name} ({each.addresses[0]})" for each in others))


def sentence(found: Choice) -> str:
    """A sentence about the choice and the alternatives."""
    text = f"--socket-ifname={AUTO}: {found.name} ({found.address}) leads to the other nodes"
    if not found.others:
        return text
    which = "is" if len(found.others) == 1 else "are"
    return f"{text}; {', '.join(found.others)} {which} up too, give --socket-ifname=NAME to use another"


def _failure(why: str) -> str:
    return f"{socket.gethostname()} has no interface for --socket-ifname={AUTO}: {why}; give the name of one instead"
