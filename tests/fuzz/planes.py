"""Targets over real sockets: a control plane with intruders at its port, and a node whose server is an intruder."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from tempfile import TemporaryDirectory

import trustme

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.base.tls import ControlTls, TlsChannel, TlsError, TlsFiles
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, frame
from rallypoint.control.protocol.handshake import Proof
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    JoinRequest,
    LinkDown,
    LinkLost,
    Notification,
    Placed,
)
from rallypoint.control.protocol.signing import Signers, proof, transcript_of
from tests.fuzz.control import ANSWERS, HELLO, NOTICES, REQUESTS, encoded
from tests.fuzz.target import Target, no_errors

_TIMEOUT = 120.0
_KEY, _WRONG = b"k" * 32, b"w" * 32
_JOB = Settings("job", 2, 2, join_timeout=_TIMEOUT)
_INTRUDERS = 3


class _Intruder:
    """Somebody at the port, who knows the protocol and perhaps a key."""

    def __init__(self, port: int, key: bytes | None, job: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT)
        self._key = key
        self._job = job
        self._signers: Signers | None = None

    def sends(self, data: bytes) -> None:
        """Send bytes, if anybody takes them."""
        with suppress(OSError):
            self._socket.sendall(data)

    def greets(self) -> None:
        """Greet as a node of a job does, and prove what can be proven."""
        hello = codec.encode(HELLO._replace(job=self._job, has_secret=self._key is not None))
        self.sends(MAGIC + frame(hello))
        if self._key is None:
            return
        with suppress(OSError):
            answer = self._socket.recv(65536)[len(MAGIC) + 4 :]
            transcript = transcript_of(hello, answer)
            self.sends(frame(codec.encode(Proof(proof(self._key, transcript)))))
            self._signers = Signers(self._key, transcript, node=True)

    def says(self, payload: bytes) -> None:
        """Send a frame, signed where there is something to sign with."""
        self.sends(frame((payload if self._signers is None else self._signers.outgoing.sign(payload))[: 1 << 16]))

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


@contextmanager
def _members(port: int, key: bytes | None) -> Iterator[list[queue.SimpleQueue[Notification]]]:
    """Two nodes that ask for their places."""
    heard: list[queue.SimpleQueue[Notification]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    with contextlib.ExitStack() as links:
        for number, each in enumerate(heard):
            endpoint = Endpoint("127.0.0.1", port)
            link = TcpLink(
                FixedEndpoint(DialTarget(endpoint, key)),
                _JOB,
                NodeId("", 1, number),
                each.put,
                Deadline.after(_TIMEOUT),
            )
            links.enter_context(closing(link))
            link.send(JoinRequest(NodeInfo("default", 1, "", 7000), _TIMEOUT))
        yield heard


def _placed(heard: queue.SimpleQueue[Notification]) -> bool:
    while True:
        notice = heard.get(timeout=_TIMEOUT)
        if isinstance(notice, (Placed, LinkLost)):
            return isinstance(notice, Placed)


def plane(data: bytes) -> None:
    """Intruders without a secret, with a wrong one, or of other jobs: the job's nodes meet, and nothing goes wrong.

    After a byte for who they are: which of them, what he does, how much of it, and what.
    """
    kind, data = data[0] % 3 if data else 0, data[1:]
    key = None if kind == 0 else _KEY
    server = ControlServer(
        ManyJobs() if kind == 0 else Dispatcher(_JOB),
        listening_socket("127.0.0.1", 0),
        keys=None if key is None else lambda _job: (_KEY,),
    )
    with no_errors(), closing(server), contextlib.ExitStack() as stack:
        intruders = [
            stack.enter_context(closing(_Intruder(server.port, _WRONG if kind == 2 else None, f"job {number * kind}")))
            for number in range(_INTRUDERS)
        ]
        for each in intruders[:2]:
            each.greets()
        _misbehave(intruders, data)
        with _members(server.port, key) as heard:
            assert all(_placed(each) for each in heard)
    assert not server.connections


def _misbehave(intruders: Sequence[_Intruder], data: bytes) -> None:
    while len(data) > 1:
        intruder, what, much, data = intruders[data[0] % len(intruders)], data[0] >> 4, data[1], data[2:]
        if what < 6:
            intruder.says(encoded(REQUESTS)[much % len(REQUESTS)])
        elif what < 12:
            intruder.says(data[:much])
            data = data[much:]
        elif what < 14:
            intruder.sends(data[:much])
            data = data[much:]
        elif what == 14:
            intruder.greets()
        else:
            intruder.close()


def _plane_seeds() -> Sequence[bytes]:
    made = []
    for kind in range(3):
        made.append(bytes([kind]) + bytes(each for number in range(len(REQUESTS)) for each in (number % 2, number)))
        for payload in encoded((HELLO, *REQUESTS[:4])):
            short = payload[:255]
            made.append(bytes([kind, 0x60, len(short)]) + short + bytes([0xC2, len(short)]) + short + b"\xe2\0\xf1\0")
    return made


def link(data: bytes) -> None:
    """A node at whose endpoint an intruder listens: it is told that this is no control plane, or that it is lost."""
    heard: queue.SimpleQueue[Notification] = queue.SimpleQueue()
    with no_errors(), socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_as_an_intruder, args=(listener, data))
        thread.start()
        key = _KEY if data[:1] == b"s" else None
        made = TcpLink(
            FixedEndpoint(DialTarget(Endpoint(*listener.getsockname()), key)),
            _JOB,
            NodeId("", 1, 0),
            heard.put,
            Deadline.after(0.05),
        )
        with closing(made):
            made.send(JoinRequest(NodeInfo("default", 1, "", 7000), 0.05))
            while not isinstance(heard.get(timeout=_TIMEOUT), (LinkLost, LinkDown, JobEnded, JoinRefused)):
                pass
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(_TIMEOUT)
        assert not thread.is_alive()


def _answer_as_an_intruder(listener: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # it is closed
        while True:
            peer, _ = listener.accept()
            with peer, suppress(OSError):
                peer.settimeout(_TIMEOUT)
                peer.recv(65536)
                peer.sendall(data[1:])
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass


def _link_seeds() -> Sequence[bytes]:
    challenge, welcome, refused = map(frame, encoded(ANSWERS))
    made = [b"o" + MAGIC + refused, b"s" + MAGIC + challenge + welcome, b"o" + MAGIC + challenge]
    return [*made, *(b"o" + MAGIC + welcome + frame(payload) for payload in encoded(NOTICES))]


@cache
def _tls() -> tuple[ControlTls, bytes]:
    """The coordinator's files, and what a node of ours says first."""
    import ssl

    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    with TemporaryDirectory() as folder:
        files = TlsFiles(f"{folder}/cert.pem", f"{folder}/key.pem", f"{folder}/ca.pem", "")
        certificate.private_key_pem.write_to_path(files.key)
        certificate.cert_chain_pems[0].write_to_path(files.cert)
        authority.cert_pem.write_to_path(files.ca)
        tls = ControlTls(files)
        said = ssl.MemoryBIO()
        node = tls.for_node().wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            node.do_handshake()
        return tls, said.read()


def tls_channel(data: bytes) -> None:
    """The coordinator's end of a TLS connection, in two pieces: nothing is said yet, or one error."""
    half = len(data) // 2
    with no_errors():
        channel = TlsChannel(_tls()[0])
        with suppress(TlsError):
            for piece in (data[:half], data[half:]):
                assert channel.receive(piece) == b""
                channel.to_send()
        channel.close_notify()
        channel.to_send()


TARGETS = {
    "tls": Target(tls_channel, lambda: [_tls()[1], b"\x16\x03\x01\x00\x05abcde"], ("base/tls.py",), executions=300),
    "plane": Target(
        plane,
        _plane_seeds,
        tuple(f"control/coordinator/{name}.py" for name in ("connection", "server", "session", "transport")),
        executions=600,
    ),
    "link": Target(link, _link_seeds, ("control/client/dialing.py", "control/client/tcp_link.py"), executions=40),
}
