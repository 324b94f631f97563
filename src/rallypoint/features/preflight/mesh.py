"""The mesh of `--preflight`: the nodes dial each other before the job's first workers start.

Laws:

1. The mesh runs only in the job's first round, which all nodes recognize by its number: a later node would dial nodes
   that are finished with it. If that round ends early, the mesh is skipped.
2. Every node listens before others can know its address, and until it has the result or its round ends.
3. All nodes get the same result (`clusters.preflight.mesh`) through the round's worker store. If all nodes must be
   reached, group rank 0 reports the failure, and the others wait for the verdict.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from rallypoint.agent.feature import Agent, Feature
from rallypoint.base.endpoint import Endpoint, is_loopback, own_address
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.side_thread import start_thread
from rallypoint.clusters.preflight.dialing import DIAL_TIMEOUT, MeshListener, Target, dial_all
from rallypoint.clusters.preflight.mesh import (
    Finding,
    MeshLine,
    MeshNode,
    decode_finding,
    decode_lines,
    dialled_ranks,
    encode_finding,
    encode_lines,
    is_logged_by,
    mesh_lines,
)
from rallypoint.clusters.preflight.results import REQUIRE
from rallypoint.features.round_setup import (
    FIRST_ROUNDS,
    NO_THREAD,
    PeerUser,
    RoundInSetup,
    RoundSetup,
    SetupStep,
    Unprepared,
    exchange_of,
    missed_by,
    stated_address,
)

log = get_logger(__name__)

_FINDINGS, _LINES = 10.0, 20.0
"""Seconds that group rank 0 waits for the other nodes' findings after the time for dialing, and that these wait for its
summary."""
_VERDICT = 30.0
"""Seconds that a node waits for the job's verdict before it reports the mesh failure itself."""


class Mesh(Feature):
    """Lets one agent dial the others. If dialing is required and impossible, the agent does not start."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        mode = self.workers.group.spec.features.checks.preflight
        try:
            exchange = exchange_of(self.workers, self.workers.max_nodes, "--preflight")
        except UserError as error:
            if mode == REQUIRE:
                raise
            log.warning("connections between the nodes will not be tested: %s", error)
            return
        dialer = MeshDialer(mode)
        exchange.users.append(dialer)
        RoundSetup.of(self.workers).steps.append(dialer)


class MeshDialer(PeerUser, SetupStep):
    """Dials other nodes once it has their records: a user of the exchange, and the step that follows it.

    Args:
        mode: `WARN` or `REQUIRE`.
    """

    use = "mesh"

    def __init__(self, mode: str) -> None:
        self._required = mode == REQUIRE
        self._listeners: dict[RoundInSetup, MeshListener] = {}
        """Listeners for nodes that dial this one, by round: an earlier round's thread might still ask."""

    # For the exchange

    def takes_part(self, round_: RoundInSetup) -> bool:
        return round_.place.group_world_size > 1 and round_.scope in FIRST_ROUNDS

    def reserve(self, round_: RoundInSetup) -> Sequence[int]:
        listener = self.listen(round_)
        round_.at_end(listener.close)
        self._listeners = {round_: listener}
        return [listener.port]

    def listen(self, round_: RoundInSetup) -> MeshListener:
        """Listen for other nodes, at an address that needs no name server."""
        store, address = round_.store_endpoint, stated_address(round_)
        if not address and (":" in store.host or store.host.replace(".", "").isdigit()):
            address = own_address(store)
        return MeshListener(address, only_here=is_loopback(store.host))

    def wanted(self, round_: RoundInSetup) -> Collection[int]:
        return dialled_ranks(round_.place.group_rank, round_.place.group_world_size)

    # The step

    def begin(self, round_: RoundInSetup) -> bool:
        return round_ in self._listeners

    def run(self, round_: RoundInSetup) -> None:
        listener = self._listeners.get(round_)
        if listener is None or not round_.records:
            return
        try:
            lines, total = self._dial(round_, listener)
        except Exception as error:
            missed_by(self, round_, error)
            return
        self._judge(round_, lines, total)

    def missed(self, round_: RoundInSetup, why: str) -> None:
        """Handle records or findings that did not arrive."""
        if self._required:
            raise Unprepared(why, ends_job=True)
        if round_.records:
            log.warning("it is unknown whether the nodes can reach each other: %s", why)
        else:
            log.warning("this node will not test its connections to the others: %s", why)

    def sentence(self, round_: RoundInSetup, why: str) -> str:
        where = round_.store_endpoint
        return f"{socket.gethostname()} cannot exchange its results over the worker store at {where}: {why}"

    def take(self, round_: RoundInSetup) -> None:
        """Do nothing: the thread already logged the findings."""

    def close(self) -> None:
        """Do nothing: each round closes its listener."""

    def _dial(self, round_: RoundInSetup, listener: MeshListener) -> tuple[Sequence[MeshLine], int]:
        """Dial the other nodes, and exchange the findings.

        Returns:
            The first lines about nodes that cannot reach each other, the same on all nodes, and the total number of
            lines.
        """
        began = round_.clock.monotonic()
        place, own, store = round_.place, round_.records[round_.place.group_rank], round_.store
        rank, count = place.group_rank, place.group_world_size
        round_.limit(DIAL_TIMEOUT + (_LINES if rank else _FINDINGS))
        scope = f"{round_.group.spec.rdzv_handler.get_run_id()}/{place.origin}/{round_.scope}"
        me = MeshNode(scope, rank, own.node)
        if start_thread(lambda: listener.serve(me), "rallypoint-mesh") is None:
            raise Unprepared(NO_THREAD)
        others = [round_.records[other] for other in dialled_ranks(rank, count)]
        targets = [
            Target(MeshNode(scope, other.group_rank, other.node), other.address, other.ports[self.use][0])
            for other in others
            if self.use in other.ports
        ]
        failures = dial_all(targets, me)
        where = str(Endpoint(own.address, listener.port))
        store.set(round_.key(f"mesh/{rank}"), encode_finding(Finding(own.node, where, failures)))
        if rank == 0:
            absent = {other.group_rank: other.node for other in others if self.use not in other.ports}
            data = encode_lines(mesh_lines(_findings(round_, absent), count, absent))
            store.set(round_.key("mesh/lines"), data)
        else:
            round_.wait([round_.key("mesh/lines")])
            data = bytes(store.get(round_.key("mesh/lines")))
        total, lines = decode_lines(data, count)
        if not lines:
            took = round_.clock.monotonic() - began
            log.info("the nodes of the round can reach each other (this node dialled %d, in %.3f s)", len(others), took)
        return lines, total

    def _judge(self, round_: RoundInSetup, lines: Sequence[MeshLine], total: int) -> None:
        """Judge the result of dialing."""
        rank = round_.place.group_rank
        for line in lines:
            if is_logged_by(line, rank) and not (self._required and rank == 0 and line is lines[0]):
                log.warning("%s", line.text)
        if total > len(lines) and rank == 0:
            log.warning("and %d more such findings", total - len(lines))
        if not lines or not self._required:
            return
        if rank:
            round_.limit(_VERDICT)
            if round_.over.wait(_VERDICT):
                return
        more = f"; {total - 1} more such findings are in the log of group rank 0" if total > 1 else ""
        raise Unprepared(f"{lines[0].text}{more}", lines[0].node, ends_job=True)


def _findings(round_: RoundInSetup, absent: Collection[int]) -> Mapping[int, Finding]:
    """Findings that arrive in time from all nodes except absent ones."""
    count, store = round_.place.group_world_size, round_.store
    keys = {rank: round_.key(f"mesh/{rank}") for rank in range(count) if rank not in absent}
    with suppress(Exception):  # missing findings are handled below
        round_.wait(list(keys.values()))
    found = [rank for rank in keys if store.check([keys[rank]])]
    values = store.multi_get([keys[rank] for rank in found])
    return {rank: decode_finding(bytes(data), rank, count) for rank, data in zip(found, values, strict=True)}
