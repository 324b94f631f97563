"""A target in virtual time: a coordinator of many jobs, and intruders in sessions of an open one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAX_FRAME, decode_state, encode_state
from rallypoint.control.protocol.handshake import (
    HandshakeError,
    Hello,
    ServerHandshake,
    Welcome,
)
from rallypoint.control.protocol.messages import SIGNATURE_SIZE, Heartbeat, JoinRequest, Notification, Placed
from tests.fuzz.control import HELLO, MEMBER, REQUESTS, SETTINGS, encoded, heard
from tests.fuzz.target import Target, no_errors
from tests.unit.clocks import HandClock


class _Intruder:
    """One connection, as `connection.ControlConnection` has it behind the frames."""

    def __init__(self, jobs: ManyJobs, number: int) -> None:
        self._jobs = jobs
        self._peer = f"192.0.2.{number}"
        self._handshake = ServerHandshake(None, None, b"n" * 16)
        self.dispatcher: Dispatcher | None = None
        self.session = 0

    def says(self, payload: bytes) -> bool:
        """Hear a frame; returns whether the connection goes on."""
        try:
            if self.dispatcher is not None:
                request = codec.decode_request(payload)
                if isinstance(request, Heartbeat):
                    return self.dispatcher.heartbeat(self.session)
                return self.dispatcher.receive(self.session, request)
            hello = codec.decode(payload, Hello)
            if self._handshake.hello(hello) is not None:
                return False
            self.dispatcher = self._jobs.dispatcher_for(hello, self._peer)
        except (codec.CodecError, HandshakeError):
            return False
        record = SessionRecord(hello.node, hello.address, settings=hello.settings)
        self.session = self.dispatcher.attach(told, record)
        codec.decode_answer(codec.encode(Welcome(self.dispatcher.settings.lease, self.dispatcher.incarnation)))
        return True

    def goes(self) -> None:
        """Disconnect."""
        if self.dispatcher is not None:
            self.dispatcher.detach(self.session)


def told(notice: Notification) -> None:
    """What is told must fit a frame, and its node must understand it."""
    data = codec.encode(notice)
    assert len(data) + SIGNATURE_SIZE <= MAX_FRAME, f"a {type(notice).__name__} of {len(data)} bytes"
    heard(codec.decode_notification(data))


def coordinator(data: bytes) -> None:
    """Intruders in a session of an open coordinator: nothing goes wrong there, and another job's node is placed."""
    with no_errors():
        clock = HandClock(100.0)
        jobs = ManyJobs(clock)
        intruders: dict[int, _Intruder] = {}
        while len(data) > 1:
            what, much, data = data[0], data[1], data[2:]
            who = what >> 4 & 3
            if what & 15 == 15:
                intruders.pop(who, _Intruder(jobs, who)).goes()
                continue
            if what & 15 == 14:
                clock.now += much / 10
                jobs.tick()
                continue
            if what & 15 < 8:
                payload = encoded((HELLO, *REQUESTS))[much % (1 + len(REQUESTS))]
            else:
                size = much + 256 * (what & 7)
                payload, data = data[:size], data[size:]
            intruder = intruders.setdefault(who, _Intruder(jobs, who))
            if not intruder.says(payload):
                intruder.goes()
                del intruders[who]
        _still_serves(jobs, clock, intruders)


def _still_serves(jobs: ManyJobs, clock: HandClock, intruders: dict[int, _Intruder]) -> None:
    dispatchers = [each.dispatcher for each in intruders.values() if each.dispatcher is not None]
    for dispatcher in dispatchers:
        assert decode_state(encode_state(dispatcher.state)) == dispatcher.state, "its state can be kept"
        assert not math.isnan(dispatcher.wake_at())
    heard_of: list[Notification] = []
    honest = HELLO._replace(job="of others", settings=SETTINGS._replace(run_id="of others", max_nodes=1))
    dispatcher = jobs.dispatcher_for(honest, "198.51.100.1")
    session = dispatcher.attach(heard_of.append, SessionRecord(NodeId("h", 1, 0), "h", settings=honest.settings))
    dispatcher.receive(session, JoinRequest(MEMBER, 20.0))
    assert any(isinstance(each, Placed) for each in heard_of)
    for each in intruders.values():
        each.goes()
    dispatcher.detach(session)
    for _ in range(8):
        clock.now += 100.0
        jobs.tick()
    assert not any(each.members for each in dispatchers)


def _coordinator_seeds() -> Sequence[bytes]:
    made = [b"\x00\x00\x10\x00"]  # two intruders come
    greeted = made[0]
    for number in range(len(REQUESTS)):
        joins = b"\x00\x01\x10\x01"
        one = bytes([0x00, 1 + number])
        made += [greeted + one, greeted + joins + one + b"\x0e\x20" + joins + b"\x0f\x00" + one]
    for payload in encoded((HELLO, *REQUESTS[:10])):
        if len(payload) < 256:
            made.append(greeted + bytes([0x08, len(payload)]) + payload + b"\x0e\x40")
    return made


TARGETS = {
    "coordinator": Target(coordinator, _coordinator_seeds, ("control/protocol/handshake.py",), executions=2500),
}
