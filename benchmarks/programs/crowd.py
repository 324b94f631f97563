"""Many nodes in one process, one plain socket each behind one epoll: what a control server has to do with, and no more.

What the nodes say is made by the production handshake and codec, once each. Reads a `Gather` line and prints `ready`;
reads a `Go` line, connects and joins with all nodes, and prints `Gathered`; then carries out each `Order` and prints
its answer. What came too late or not at all ends the program with a sentence.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from benchmarks.messages import (
    ComeBack,
    Gather,
    Gathered,
    Go,
    Order,
    Regroup,
    Sustain,
    Sustained,
    decode,
    decode_order,
    encode,
)
from benchmarks.system import raise_file_limit
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import ClientHandshake, Welcome
from rallypoint.control.protocol.messages import (
    Heartbeat,
    JoinRequest,
    NextStore,
    NodeReport,
    Notification,
    Placed,
    ReportRequested,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters

_TIMEOUT = 240.0  # seconds until all have their place
_HEARTBEAT = codec.encode(Heartbeat())
_ANSWERS = {codec.encode(Heartbeat(number)) for number in range(4)}
_LENGTH = 4
"""Bytes of a frame before its payload."""
_AT_ONCE = 16
"""Nodes that connect before it is looked at what came for the others."""
_IP_BIND_ADDRESS_NO_PORT = 24  # `socket` names it since Python 3.12
_TICK = 0.001  # seconds between looks at whose heartbeat is due
_FIRST_PID = 1000  # of workers, which nobody runs here
_FIRST_PORT = 1024  # of worker stores, which nobody opens here
_MAX_RESTARTS = 1000
_CAUSE = Cause(0, 0, "crowd", _FIRST_PID, 1, "it was to fail", "", 0.0, "")


@dataclass(slots=True)
class _Node:
    """One node: its socket, what it has said and heard, and its place once it has one."""

    number: int
    socket: socket.socket
    handshake: ClientHandshake
    frames: FrameReader = field(default_factory=FrameReader)
    incarnation: str = ""
    """The coordinator of its session before, if it comes back; then of this one."""
    lease: float = 0.0
    placed_at: float = 0.0
    round: int = -1
    rank: int = -1
    world_size: int = 0

    @property
    def info(self) -> NodeInfo:
        """What it says of itself."""
        return NodeInfo("default", 1, "", _FIRST_PORT + self.number, max_restarts=_MAX_RESTARTS)

    def send(self, *payloads: bytes, before: bytes = b"") -> int:
        """Send some frames; returns how many bytes that were."""
        return self.socket.send(before + b"".join(map(frame, payloads)))

    def received(self) -> bytes:
        """What has come."""
        data = self.socket.recv(65536)
        if not data:
            raise SystemExit(f"the server has disconnected node {self.number}")
        return data


class _Crowd:
    """All nodes of this process, and what passed between them and the server."""

    def __init__(self, order: Gather) -> None:
        self._order = order
        self._settings = _settings(order)
        self._epoll = select.epoll()
        self._nodes: dict[int, _Node] = {}
        self._greeted: list[_Node] = []
        """Nodes that have a session; each sends heartbeats from then on."""
        self._heartbeats_from = 0.0
        self._next_heartbeat = 0
        self._heartbeats_a_second = 0.0
        """As the server wants them, of all that have a session."""
        self.messages = self.bytes = self.heartbeats = self.answers = 0
        self._unplaced = order.nodes
        self._cut_off: dict[int, _Node] = {}
        """Nodes in the sessions that they had before, by number: kept until they have heard something in another."""

    def gather(self, at: float) -> Gathered:
        """From `at` on, connect with all nodes and wait until all have their place."""
        time.sleep(max(0.0, at - time.monotonic()))
        first = self._order.first
        return self._until_placed([(number, "") for number in range(first, first + self._order.nodes)])

    def carry_out(self, order: Order) -> Gathered | Sustained:
        """See the order."""
        match order:
            case Sustain(seconds=seconds):
                return self._sustain(seconds)
            case Regroup(fails=fails):
                first = next(iter(self._nodes.values()))
                if fails:
                    self._say(first, codec.encode(Fail(first.round, _CAUSE, _MAX_RESTARTS, restarts_workers=True)))
                self._unplaced += self._order.nodes
                return self._until_placed([])
            case ComeBack():
                known, self._nodes, self._greeted, self._heartbeats_a_second = self._nodes, {}, [], 0.0
                self._unplaced += self._order.nodes
                for node in known.values():
                    self._epoll.unregister(node.socket)
                    self._cut_off[node.number] = node
                return self._until_placed([(node.number, node.incarnation) for node in known.values()])

    # Inside

    def _until_placed(self, to_connect: list[tuple[int, str]]) -> Gathered:
        """Connect with these nodes, and wait until all have their place.

        Args:
            to_connect: their numbers, and the coordinators that they come back to.
        """
        until, waiting = time.monotonic() + _TIMEOUT, deque(to_connect)
        while self._unplaced:
            if time.monotonic() > until:
                raise SystemExit(f"{self._unplaced} of {self._order.nodes} nodes had no place after {_TIMEOUT:.0f} s")
            for _ in range(min(_AT_ONCE, len(waiting))):
                self._connect(*waiting.popleft())
            self._send_heartbeats()
            self._listen(0.0 if waiting else _TICK)
        nodes = list(self._nodes.values())
        return Gathered(
            returned=max(node.placed_at for node in nodes),
            ranks=[node.rank for node in nodes],
            world_sizes=sorted({node.world_size for node in nodes}),
            messages=self.messages,
            bytes=self.bytes,
        )

    def _sustain(self, seconds: float) -> Sustained:
        """Let every node send heartbeats."""
        self._heartbeats_from = 0.0
        self._send_heartbeats()
        self.heartbeats = self.answers = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._send_heartbeats()
            self._listen(_TICK)
        return Sustained(heartbeats=self.heartbeats, answers=self.answers)

    def _connect(self, number: int, incarnation: str) -> None:
        address, made = self._order.source, socket.socket()
        # Else the address has no port left soon: those of the crowds before are kept for a minute.
        made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        made.bind((address, 0))
        made.connect(("127.0.0.1", self._order.port))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setblocking(False)
        handshake = ClientHandshake(self._order.run_id, None, os.urandom(16), self._settings)
        hello = codec.encode(handshake.hello(address, NodeId(address, os.getpid(), number), incarnation))
        node = _Node(number, made, handshake, incarnation=incarnation)
        self._nodes[made.fileno()] = node
        self._epoll.register(made, select.EPOLLIN)
        self._say(node, hello, before=MAGIC)

    def _say(self, node: _Node, *payloads: bytes, before: bytes = b"") -> None:
        self.messages += len(payloads)
        self.bytes += node.send(*payloads, before=before)

    def _send_heartbeats(self) -> None:
        """Let those send a heartbeat whose time has come: one after the other, as often as the server wants it."""
        nodes = self._greeted
        if not nodes:
            return
        now, gap = time.monotonic(), 1 / self._heartbeats_a_second
        if not self._heartbeats_from:
            self._heartbeats_from = now
        due = min(int((now - self._heartbeats_from) / gap), len(nodes))
        for _ in range(due):
            self._next_heartbeat = (self._next_heartbeat + 1) % len(nodes)
            nodes[self._next_heartbeat].send(_HEARTBEAT)
        self.heartbeats += due
        self._heartbeats_from = max(self._heartbeats_from + due * gap, now - gap)

    def _listen(self, seconds: float) -> None:
        for fd, _ in self._epoll.poll(seconds, 1024):
            node = self._nodes[fd]
            for payload in node.frames.feed(node.received()):
                if payload in _ANSWERS:
                    self.answers += 1
                else:
                    self.messages += 1
                    self.bytes += _LENGTH + len(payload)
                    self._on_frame(node, payload)

    def _on_frame(self, node: _Node, payload: bytes) -> None:
        if node.lease:
            self._on_notice(node, codec.decode_notification(payload))
            return
        answer = codec.decode_answer(payload)
        if isinstance(answer, Welcome):
            node.lease = answer.lease
            self._heartbeats_a_second += 1 / (answer.heartbeat_interval or answer.lease / 3)
            self._greeted.append(node)
            asked: tuple[object, ...] = (_join(node),)
            if node.incarnation:
                asked = (ResumeRequest(node.incarnation, node.info, joining=True), *asked)
            node.incarnation = answer.incarnation
            self._say(node, *map(codec.encode, asked))
        else:
            raise SystemExit(f"node {node.number} was refused: {answer}")

    def _on_notice(self, node: _Node, notice: Notification) -> None:
        if isinstance(notice, Placed):
            place, node.placed_at = notice.placement, time.monotonic()
            node.round, node.rank, node.world_size = place.round, place.group_rank, place.group_world_size
            self._unplaced -= 1
            if node.rank == 0:
                self._say(node, codec.encode(NextStore(node.round, node.info.store_port)))
            if node.number in self._cut_off:
                self._cut_off.pop(node.number).socket.close()
        elif isinstance(notice, RoundEnded):
            if not notice.keeps_place:
                self._say(node, codec.encode(_join(node)))
        elif isinstance(notice, ReportRequested):
            self._say(node, codec.encode(NodeReport(0, (_FIRST_PID + node.number,))))


def _join(node: _Node) -> JoinRequest:
    return JoinRequest(node.info, _TIMEOUT, keeps_place=True)


def _settings(order: Gather) -> Settings:
    nodes, endpoint = order.all_nodes, f"127.0.0.1:{order.port}"
    return settings_of(RendezvousParameters("c10d", endpoint, order.run_id, nodes, nodes, lease=order.lease))


def main() -> None:
    """Follow orders until standard input ends."""
    raise_file_limit()
    crowd = _Crowd(decode(sys.stdin.readline(), Gather))
    print("ready", flush=True)
    print(encode(crowd.gather(decode(sys.stdin.readline(), Go).at)).decode(), flush=True)
    for line in sys.stdin:
        print(encode(crowd.carry_out(decode_order(line))).decode(), flush=True)


if __name__ == "__main__":
    main()
