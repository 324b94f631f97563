"""Opens sessions with a control server as often as needed: looks up its name, connects, greets, proves the secret.

A problem that waiting can solve is an OSError (no server is listening yet, the name does not resolve yet, an answer is
late). A problem that waiting cannot solve (a foreign service, another job, a wrong secret) is a `HandshakeError` with
one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rallypoint.base.endpoint import (
    Endpoint,
    host_name,
    is_acknowledged,
    is_local_address,
    shorten_retransmission,
    usable_address,
)
from rallypoint.base.log import get_logger, printable
from rallypoint.base.own_process import process_token
from rallypoint.control.membership.state import NodeId, Settings, recovery_timeout
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.errors import FrameError, SignatureError
from rallypoint.control.protocol.handshake import (
    Challenge,
    ClientHandshake,
    HandshakeError,
    HandshakeRefused,
    Welcome,
)

if TYPE_CHECKING:
    from rallypoint.base.tls import ControlTls
    from rallypoint.control.protocol.signing import Signers

log = get_logger(__name__)


_LOOK_UP = 15.0
"""Seconds that one attempt waits for the name's look-up, which continues for the next attempt."""

_NOT_TLS = {"WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"}
"""OpenSSL's reasons when the bytes are not TLS."""

_SILENT_AFTER, _BUSY_FOR = 3.0, 15.0
"""Seconds to wait for the greeting's answer before probing for another kind of service, and the maximum total wait if
it is a control server (`patience`): a server that is busy with many nodes must not get another connection from each."""
_TO_DIAL_AGAIN = 2.0
"""Maximum seconds for the pause after an attempt plus the next attempt."""
_PROBE_TIMEOUT = 2.0

_AT_ONCE = 1024
"""Number of nodes that can dial at the same time: they fit into the queue of a listening socket."""
_DIAL_PACE, _PROBE_PACE, _PROGRESS_PACE = 80e-6, 1e-3, 0.5e-3
"""Seconds per node over which a job's nodes spread actions that all might take at the same time: dialing, probing a
silent server, and asking for the progress. About the time that each action costs a server."""


def _dial_spread(settings: Settings) -> float:
    """Random seconds that a node waits before it dials, so that not all nodes of a large job dial at once."""
    return random.uniform(0.0, _DIAL_PACE * max(0, settings.max_nodes - _AT_ONCE))


def progress_spread(settings: Settings) -> float:
    """Random seconds that a node waits before asking for the progress."""
    return random.uniform(0.0, _PROGRESS_PACE * settings.max_nodes)


def _probe_spread(settings: Settings) -> float:
    return random.uniform(0.0, _PROBE_PACE * settings.max_nodes)


RETRYABLE = (OSError, TimeoutError, asyncio.IncompleteReadError, codec.CodecError)
"""Exceptions of an attempt after which the next attempt can succeed."""


A = TypeVar("A", Challenge, Welcome)


class _Address(NamedTuple):
    """One address of a name, in the form that sockets use."""

    family: int
    kind: int
    protocol: int
    name: Any

    @property
    def host(self) -> str:
        """The numeric address without the port."""
        return str(self.name[0])


class ClientSession:
    """A connection to a control server; from the welcome on, a session."""

    welcome: Welcome

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.signers: Signers | None = None
        """Signs each frame, starting with the server's answer to the proof; None if the job has no key."""
        self._reader = reader
        self._frames = FrameReader()
        self._unread: deque[bytes] = deque()

    def send(self, payload: bytes) -> None:
        """Send a message, unless the connection is closed."""
        if not self.writer.is_closing():
            self.writer.write(frame(payload if self.signers is None else self.signers.outgoing.sign(payload)))

    async def receive(self) -> bytes:
        """Receive the next message.

        Raises:
            OSError: the connection broke, or the server closed it.
            FrameError: the bytes are not our frames, or the signature is wrong.
        """
        payload = await self.next_frame()
        return payload if self.signers is None else self.signers.incoming.verify(payload)

    async def next_frame(self) -> bytes:
        """Receive the next frame, which may be signed. Raises as `receive` does."""
        while not self._unread:
            data = await self._reader.read(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._unread.extend(self._frames.feed(data))
        return self._unread.popleft()


class Dialer:
    """Opens sessions of one node with the server at an endpoint."""

    def __init__(
        self,
        place: DialTarget,
        settings: Settings,
        node: NodeId | None = None,
        *,
        is_watcher: bool = False,
        only_greets: bool = False,
    ) -> None:
        self._endpoint = place.endpoint
        self._flag = place.flag
        self._settings = settings
        self.node = node or NodeId("", os.getpid(), 0, host_name())
        """The node to open sessions for, by default one for sessions without a node. The first session fills in its
        address if needed."""
        self._is_watcher = is_watcher
        self._only_greets = only_greets
        self._key = place.key
        self._tls = place.tls
        self._silent_attempts = 0
        self._lookup_task: asyncio.Task[list[_Address] | Exception] | None = None
        self._silent: set[_Address] = set()
        """Addresses that did not answer the last attempt; others are tried first."""
        self.unfinished = "nothing was tried yet"
        """What the attempt is waiting for, or last waited for: the message after its timeout."""

    async def dial(
        self, timeout: float, incarnation: str = "", resolved: Callable[[list[str]], None] | None = None
    ) -> ClientSession:
        """Try once, at each address of the endpoint's name.

        Args:
            timeout: seconds for each TCP connection, without TLS; the kernel's own timeout grows to minutes.
            incarnation: the coordinator of this node's last session; empty for a new node.
            resolved: called with the numeric addresses of the endpoint before they are tried.

        Raises:
            HandshakeError: the service there is the wrong one; the text says why.
            OSError, TimeoutError, CodecError: this attempt failed (`RETRYABLE`).
        """
        addresses = await self._resolve()
        if resolved is not None:
            resolved(list(dict.fromkeys(address.host for address in addresses)))
        connection = await self._connect(addresses, timeout)
        self.unfinished = "the server accepted the connection but did not answer the greeting"
        session = ClientSession(*await self._open_streams(connection))
        try:
            await self._handshake(session, incarnation)
        except BaseException:
            session.writer.close()
            raise
        return session

    async def _resolve(self) -> list[_Address]:
        """Return the name's addresses, starting with those most likely to answer. Only one look-up runs at a time."""
        self.unfinished = f"the lookup of the name {self._endpoint.host!r} was not answered"
        if self._lookup_task is None:
            self._lookup_task = asyncio.ensure_future(_look_up(self._endpoint))
        await asyncio.wait({self._lookup_task}, timeout=_LOOK_UP)
        if not self._lookup_task.done():
            raise TimeoutError(self.unfinished)
        result, self._lookup_task = self._lookup_task.result(), None
        if isinstance(result, Exception):
            raise result
        if self._silent.issuperset(result):
            self._silent.clear()
        return sorted(result, key=self._silent.__contains__)

    async def _connect(self, addresses: list[_Address], timeout: float) -> socket.socket:
        """Connect to the first address that answers."""
        failures: list[OSError] = []
        for address in addresses:
            self.unfinished = f"{address.host} does not answer a TCP connection"
            self._silent.add(address)
            try:
                connection = await self._connect_to(address, timeout)
            except TimeoutError:
                failures.append(TimeoutError(self.unfinished))
            except OSError as error:  # its text is asyncio's and does not explain the number
                failures.append(error if error.errno is None else OSError(error.errno, os.strerror(error.errno)))
            else:
                self._silent.discard(address)
                return connection
        if len(failures) == 1 and (isinstance(failures[0], TimeoutError) or addresses[0].host == self._endpoint.host):
            raise failures[0]
        is_refused = failures and all(isinstance(failure, ConnectionRefusedError) for failure in failures)
        raise (ConnectionRefusedError if is_refused else OSError)(
            "; ".join(
                f"{address.host}: {error_words(error)}" for address, error in zip(addresses, failures, strict=True)
            )
        )

    async def _connect_to(self, address: _Address, timeout: float) -> socket.socket:
        connection = socket.socket(address.family, address.kind, address.protocol)
        try:
            connection.setblocking(False)
            shorten_retransmission(connection)
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(connection, address.name)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _open_streams(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the streams of a connection, with TLS if the control plane uses it."""
        try:
            if self._tls is None:
                return await asyncio.open_connection(sock=connection)
            async with asyncio.timeout(_SILENT_AFTER + patience(self._settings)):
                return await self._start_tls(connection, self._tls)
        except BaseException:
            connection.close()
            raise

    async def _start_tls(
        self, connection: socket.socket, tls: ControlTls
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        import ssl

        try:
            reader, writer = await asyncio.open_connection(
                sock=connection, ssl=tls.for_node(), server_hostname=self._endpoint.host
            )
        except ssl.SSLCertVerificationError as error:
            raise self._tls_error(f"its certificate is not accepted ({error.verify_message})") from None
        except ssl.SSLError as error:
            if error.reason in _NOT_TLS:
                raise self._tls_error("it does not use TLS; set tls_cert, tls_key and tls_ca there too") from None
            raise self._tls_error(f"a TLS connection to it failed ({error.reason or error})") from None
        objection = tls.objection_to(writer.get_extra_info("peercert"))
        if objection is not None:
            writer.close()
            raise self._tls_error(objection)
        return reader, writer

    def _tls_error(self, why: str) -> HandshakeError:
        return HandshakeError(f"the control plane at {self._endpoint} cannot be trusted: {why}")

    async def _handshake(self, session: ClientSession, incarnation: str) -> None:
        handshake = ClientHandshake(
            self._settings.run_id,
            self._key,
            os.urandom(16),
            self._settings,
            is_watcher=self._is_watcher,
            only_greets=self._only_greets,
        )
        address = usable_address(str(session.writer.get_extra_info("sockname")[0]))
        node = self.node if self.node.addr else self.node._replace(addr=address)
        try:
            hello = codec.sendable(handshake.hello(address, node, incarnation, process_token()))
        except codec.NotSendable as error:
            raise HandshakeError(f"this node cannot greet the control plane at {self._endpoint}: {error}") from None
        session.writer.write(MAGIC)
        session.send(hello)
        answer = await self._answer(session)
        if handshake.key is not None:
            from rallypoint.control.protocol.signing import transcript_of

            self._expect(codec.decode_answer(answer), Challenge)
            session.send(codec.encode(handshake.prove(transcript_of(hello, answer))))
            answer = await self._answer(session)
        session.welcome = self._expect(codec.decode_answer(self._verify(answer, handshake)), Welcome)
        session.signers = handshake.signers
        self.node = node

    def _expect(self, answer: Challenge | Welcome | HandshakeRefused, kind: type[A]) -> A:
        if isinstance(answer, HandshakeRefused):
            raise HandshakeError(
                f"the control plane at {self._endpoint} refused this node: {printable(answer.sentence, 1000)}"
            )
        if not isinstance(answer, kind):
            raise self._foreign_service_error(f"it answered with an unexpected {type(answer).__name__}")
        return answer

    def _verify(self, answer: bytes, handshake: ClientHandshake) -> bytes:
        """Verify the first frame after the proof: signed, or a refusal if the server does not have our key."""
        if handshake.signers is None:
            return answer
        try:
            return handshake.signers.incoming.verify(answer)
        except SignatureError:
            with suppress(codec.CodecError):
                if isinstance(codec.decode_answer(answer), HandshakeRefused):
                    return answer
        raise HandshakeError(
            f"the control plane at {self._endpoint} could not prove that it knows this job's RALLYPOINT_SECRET; set "
            "the same secret on all nodes, and check that the endpoint belongs to this job"
        )

    async def _answer(self, session: ClientSession) -> bytes:
        """Receive the next frame of the handshake."""
        try:
            try:
                async with asyncio.timeout(_SILENT_AFTER + _probe_spread(self._settings)):
                    return await session.next_frame()
            except TimeoutError:  # the server is busy if it is ours and received our greeting
                if await self._seems_foreign() or not is_acknowledged(session.writer.get_extra_info("socket")):
                    raise
            async with asyncio.timeout(patience(self._settings)):
                return await session.next_frame()
        except FrameError as error:
            raise self._foreign_service_error(str(error)) from None
        except TimeoutError:
            raise
        except OSError as error:  # a reset or a TLS alert
            reason = getattr(error, "reason", None)
            if self._tls is not None and reason:
                raise self._tls_error(f"it does not accept our certificate ({reason})") from None
            await asyncio.sleep(_probe_spread(self._settings))
            await self._seems_foreign()
            raise

    async def _seems_foreign(self) -> bool:
        """Whether a silent service might be foreign. Raises HandshakeError if it is a torch store."""
        if not await _answers_as_torch_store(self._endpoint):
            return False
        # A static job's own port also answers like this, and might only have been slow: one answer is no proof.
        self._silent_attempts += 1
        if self._silent_attempts > 1:
            raise self._foreign_service_error("it is a torch TCPStore, perhaps of a torchrun job")
        return True

    def _foreign_service_error(self, what: str) -> HandshakeError:
        return HandshakeError(
            f"the program listening at {self._endpoint} is not Rallypoint's control plane: {what}; set "
            f"{self._flag.replace('addr', 'port').replace('ADDR', 'PORT')} to an unused port"
        )


def error_words(error: Exception) -> str:
    """The text of an error, without its number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


async def _look_up(endpoint: Endpoint) -> list[_Address] | Exception:
    """Look up the name's addresses. An error is returned, since nobody might be left to catch it."""
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except Exception as error:
        if endpoint.host != socket.gethostname():
            return error
        # Another agent on this machine is the host: it recognized the name, which no name server knows.
        answers = await loop.getaddrinfo("127.0.0.1", endpoint.port, type=socket.SOCK_STREAM)
    return list(
        dict.fromkeys(_Address(int(family), int(kind), protocol, name) for family, kind, protocol, _, name in answers)
    )


async def _answers_as_torch_store(endpoint: Endpoint) -> bool:
    """Whether a silent service answers the first messages of the TCPStore protocol, so that an error can name it.
    torch's server ignores greetings that it does not know (contract section 9.2). Takes at most 2 s."""
    from rallypoint.store.wire import PROBE_NONCE, probe

    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            try:
                writer.write(probe())
                return await reader.readexactly(4) == PROBE_NONCE.to_bytes(4, "little")
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


# Where to dial


class DialTarget(NamedTuple):
    """Where a control server listens, the key that its nodes share with it, its TLS, and its name for messages."""

    endpoint: Endpoint
    key: bytes | None = None
    tls: ControlTls | None = None
    flag: str = "--rdzv-endpoint"


class EndpointResolver:
    """Tells a link before each attempt where to dial. All methods run on the loop's thread and must not block.

    Its string form names the place, for messages.
    """

    is_permanent = False
    """Whether the service there is permanent. If not, a foreign service at that port might be gone at the next attempt.
    """

    @property
    def advice(self) -> str:
        """What to do if no server is found, for the end of a sentence."""
        raise NotImplementedError

    def resolve(self) -> DialTarget | None:
        """Return where the control server is now; None while unknown.

        Raises:
            HandshakeError: the place cannot be found, and waiting will not help.
        """
        raise NotImplementedError

    def unresolved_reason(self) -> str:
        """Message while the place is unknown."""
        return ""

    def resolved(self, addresses: list[str]) -> None:
        """Note that the name resolves to these numeric addresses, which are tried next.

        Called only if the server can run inside an agent of the job: then an agent may open a new one. An agent never
        replaces a control plane outside the job.
        """

    def session_opened(self, incarnation: str) -> None:
        """Note that a session with the coordinator of that name is open."""

    def on_failure(self, place: DialTarget, error: Exception) -> None:
        """Note that no session could be opened at that place."""


class FixedEndpoint(EndpointResolver):
    """One fixed place."""

    is_permanent = True

    def __init__(self, place: DialTarget) -> None:
        self.target = place

    @property
    def advice(self) -> str:
        return f"check {self.target.flag}, and that the node that hosts it has started"

    def __str__(self) -> str:
        return str(self.target.endpoint)

    def resolve(self) -> DialTarget | None:
        return self.target


class InferredHost(FixedEndpoint):
    """One place, hosted by the node that finds its own address behind the name, at any time."""

    def __init__(self, place: DialTarget, host_here: Callable[[bool], None]) -> None:
        """Call `host_here` to open a server if there is none; its argument says whether an earlier server was lost."""
        super().__init__(place)
        self._host_here = host_here
        self._session_seen = False
        self._seems_unhosted = False
        """Whether the last attempt showed that no server exists: it was refused, or the name did not resolve."""

    @property
    def advice(self) -> str:
        if not self._seems_unhosted:
            return super().advice
        return (
            f"no node recognizes {self.target.endpoint.host} as its own address; if that is a virtual address, set "
            f"is_host=true on one node (--rdzv-conf); otherwise {super().advice}"
        )

    def resolved(self, addresses: list[str]) -> None:
        """Open the server if one of the addresses is ours."""
        if any(map(is_local_address, addresses)):
            self._host_here(self._session_seen)

    def session_opened(self, incarnation: str) -> None:
        """Note that a server exists."""
        self._session_seen = True

    def on_failure(self, place: DialTarget, error: Exception) -> None:
        """Note that no server exists yet, or that it cannot be reached."""
        self._seems_unhosted = isinstance(error, ConnectionRefusedError | socket.gaierror)


def patience(settings: Settings) -> float:
    """Seconds to wait for the answer to a greeting that the server's kernel accepted, when the server seems busy.

    1. A server is frozen; its kernel accepts node A's greeting. Then its machine loses power, unnoticed by A.
    2. Another server starts, and node B reports to it.
    3. If A waited for the first server longer than the second server awaits A, A would count as lost.
    """
    return min(_BUSY_FOR - _SILENT_AFTER, recovery_timeout(settings) - _TO_DIAL_AGAIN)


# Repeated attempts


_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_CONNECT_FIRST, _CONNECT_AGAIN = 5.0, 1.5
"""Seconds for one attempt at a TCP connection. A lost packet is sent again after a second, then after growing pauses:
once a link is back, a new attempt is faster."""
LIVED = 3.0
"""Seconds after which a session counts as having lived: the pauses before the next session start small again."""
_REMIND_FIRST, _REMIND_AGAIN = 2.0, 10.0
"""Seconds until a log line reports an unreachable server: one that was never reached, and one that was lost."""
_REMIND_LEAST, _REMIND_MOST = 60.0, 300.0
"""Seconds between later lines, first and last."""


class Redialer:
    """Opens one session after another. Everything but the constructor runs on the loop's thread."""

    def __init__(self, resolver: EndpointResolver, settings: Settings, node: NodeId) -> None:
        self.target: DialTarget | None = None
        """The target of the last attempt and of the dialer."""
        self.endpoint_moved = asyncio.Event()
        """Set to make the next attempt at once."""
        self._attempt: asyncio.Timeout | None = None
        """Timeout of the attempt in progress."""
        self.brief_sessions = 0
        """How many consecutive sessions, up to the last one, ended before they had lived."""
        self._resolver = resolver
        self._settings = settings
        self._node = node
        self._dialer: Dialer | None = None
        self._welcome: Welcome | None = None
        """The welcome of the last session."""
        self._last_error = ""
        """Why the last attempt failed."""
        self._delay = 0.0
        """Seconds before the next attempt; 0 for none. Grows until a session has lived."""

    def session_ended(self, seconds: float, why: str) -> None:
        """Note that a session ended after `seconds`, as `why` describes. After a session that had lived, the next
        attempt starts at once."""
        if seconds >= LIVED:
            self.brief_sessions, self._delay, self._last_error = 0, 0.0, ""
        else:
            self.brief_sessions += 1
            self._failed(why)

    @property
    def server_has_moved(self) -> bool:
        """Whether the server certainly moved after the last attempt."""
        # If the place is unknown, for now or for good (`HandshakeError`), the last place might still be right.
        with contextlib.suppress(HandshakeError):
            return self._resolver.resolve() not in (None, self.target)
        return False

    def recheck_endpoint(self) -> None:
        """Give up an attempt at another place and make the next attempt at once: the server might have moved.

        1. The coordinator's machine is frozen. We dial it: its kernel accepts our greeting, and we wait for an answer.
        2. Another coordinator is elected, and awaits us for a while.
        3. If we waited for the first as long as for a busy server, we would be too late for the second.
        """
        self.endpoint_moved.set()
        attempt = self._attempt
        if attempt is not None and not attempt.expired() and self.server_has_moved:
            attempt.reschedule(asyncio.get_running_loop().time())

    async def open(self, remaining: Callable[[], float]) -> ClientSession:
        """Dial until a session is open. Before the first session, give up at once if waiting will not help.

        Args:
            remaining: returns the seconds left to try.

        Raises:
            HandshakeError: there was no session before, and the service there is not the right one.
            TimeoutError: no session in time; the text says why the last attempt failed.
        """
        await asyncio.sleep(min(_dial_spread(self._settings), remaining()))
        reminder = asyncio.ensure_future(self._report_unreachable(remaining))
        try:
            while True:
                if self._delay:
                    # 1. A session opens and ends at once: this never counts as success.
                    # 2. A pause precedes the next attempt, as after a failed one. The deadline is checked here too;
                    #    otherwise a server that only opens sessions would keep this node forever.
                    if remaining() <= 0:
                        raise TimeoutError(self._last_error)
                    with contextlib.suppress(TimeoutError):
                        pause = self._delay * random.uniform(0.5, 1.0) + _dial_spread(self._settings)
                        async with asyncio.timeout(min(pause, remaining())):
                            await self.endpoint_moved.wait()
                self.endpoint_moved.clear()
                try:
                    # Do not use wait_for: it may swallow a cancellation that arrives at the moment of success.
                    async with asyncio.timeout(max(0.1, min(remaining(), 60.0))) as self._attempt:
                        return await self._dial()
                except RETRYABLE as error:
                    self._failed(error_words(error) or self._attempt_in_progress or type(error).__name__)
                except HandshakeError as error:
                    if self._welcome is None:
                        raise
                    self._failed(str(error))
                finally:
                    self._attempt = None
        finally:
            reminder.cancel()

    def _failed(self, why: str) -> None:
        """Note that an attempt failed, or that its session did not live."""
        self._last_error = why
        self._delay = min(self._delay * 1.5, _LONGEST_DELAY) if self._delay else _FIRST_DELAY

    @property
    def _attempt_in_progress(self) -> str:
        return "" if self._dialer is None else self._dialer.unfinished

    async def _report_unreachable(self, remaining: Callable[[], float]) -> None:
        """Log from time to time, even during an attempt, that the server cannot be reached, and why."""
        pause = _REMIND_FIRST if self._welcome is None else _REMIND_AGAIN
        while True:
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, _REMIND_LEAST), _REMIND_MOST)
            advice = f"; {self._resolver.advice}" if self._welcome is None else ""
            left = remaining()
            limit = "the workers keep running" if left == float("inf") else f"giving up in {left:.0f} s"
            why = self._last_error or self._attempt_in_progress
            log.warning("waiting for the control plane at %s (%s)%s; %s", self._resolver, why, advice, limit)

    async def _dial(self) -> ClientSession:
        """Make one attempt at the current place of the control plane."""
        place, welcome = self._resolver.resolve(), self._welcome
        if place is None:
            raise OSError(self._resolver.unresolved_reason())
        if self._dialer is None or place != self.target:
            self.target = place
            self._dialer = Dialer(place, self._settings, self._node)
        try:
            if welcome is None:
                session = await self._dialer.dial(_CONNECT_FIRST, resolved=self._resolver.resolved)
            else:
                resolved = self._resolver.resolved if welcome.embedded else None
                session = await self._dialer.dial(_CONNECT_AGAIN, welcome.incarnation, resolved)
        except (*RETRYABLE, HandshakeError) as error:
            self._resolver.on_failure(place, error)
            if isinstance(error, HandshakeError) and not self._resolver.is_permanent:
                raise OSError(str(error)) from None
            raise
        self._node, self._welcome = self._dialer.node, session.welcome
        return session
