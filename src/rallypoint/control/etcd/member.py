"""One member of the cluster, over one connection: login, requests, streams.

Errors are raised as `MemberTrouble`. After an error with `ends`, the member is unusable: open a new one. Only `greet`
has its own time limit; the caller limits all other calls.

Everything runs on the loop. Only this module imports grpclib. When a connection ends, grpclib cancels the waiting task
and turns this into an error; after that, `asyncio.timeout` in the same task would not recognize its own cancellation.
So each use of grpclib runs in a separate task (`shielded`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from grpclib.client import Channel, Stream, StreamStreamMethod, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError

from rallypoint.base.endpoint import Endpoint
from rallypoint.control.etcd import messages
from rallypoint.control.etcd.api import (
    Credentials,
)
from rallypoint.control.etcd.messages import DecodingError, Diagnosis, Method, RequestOutcome, classify

T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task whose failure may be ignored."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
    return task


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a separate task and return its result. The waiting task can be cancelled; the work cannot."""
    task = start_task(work)
    try:
        await asyncio.wait({task})
        return task.result()
    finally:
        task.cancel()


class MemberTrouble(Exception):
    """Something went wrong with a member.

    Attributes:
        ends: whether the connection is unusable.
        broke: whether the connection broke mid-exchange; the peer may not be etcd (`_detect_service`).
    """

    def __init__(self, endpoint: Endpoint, diagnosis: Diagnosis, ends: bool, broke: bool = False) -> None:
        super().__init__(f"{endpoint} {diagnosis.problem}")
        self.endpoint = endpoint
        self.diagnosis = diagnosis
        self.ends = ends
        self.broke = broke

    @property
    def outcome(self) -> RequestOutcome:
        return self.diagnosis.outcome

    @property
    def sentence(self) -> str:
        """The problem and the remedy."""
        remedy = f"; {self.diagnosis.remedy}" if self.diagnosis.remedy else ""
        return f"etcd at {self.endpoint} {self.diagnosis.problem}{remedy}"


class _Bytes(CodecBase):
    """Passes bytes through: `messages` encodes and decodes."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


class Member:
    """A connection to one member, from `greet` to `close`."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, credentials: Credentials | None) -> None:
        self.endpoint = endpoint
        self.closed = False
        self.version = ""
        """The version of etcd, if known."""
        self.heard_at = 0.0
        """When its last message arrived, on the loop's clock."""
        self._credentials = credentials
        self._tls = tls
        self._channel = Channel(endpoint.host, endpoint.port, codec=_Bytes(), ssl=tls)
        self._token: str | None = None
        self._login: asyncio.Task[None] | None = None

    async def greet(self, timeout_s: float) -> None:
        """Connect, and check that this member answers, has a leader and accepts us. Raises MemberTrouble otherwise."""
        try:
            async with asyncio.timeout(timeout_s):
                await shielded(self._greet())
        except TimeoutError:
            raise self.trouble(RequestOutcome.RETRY, f"did not answer within {timeout_s:g} s") from None
        except MemberTrouble as trouble:
            if trouble.broke:
                raise await self._diagnose(trouble, timeout_s) from None
            raise

    async def _greet(self) -> None:
        if self._credentials is not None:
            await self._log_in(self._credentials)
        try:
            status = messages.decode_status(await self._exchange(messages.STATUS, b""))
        except MemberTrouble as trouble:
            if trouble.outcome is not RequestOutcome.REFUSED or trouble.ends or self._credentials is not None:
                raise
            return  # the cluster has users and reveals no more; the next request shows our permissions
        if not status.leader:
            raise self.trouble(RequestOutcome.RETRY, "has no leader", "check that most of its members are running")
        self.version = status.version

    async def log_in(self) -> None:
        """Fetch a new token, once for all simultaneous callers.

        Raises:
            MemberTrouble: the user is refused, or the member is gone.
        """
        if self._credentials is None:
            raise self.trouble(RequestOutcome.REFUSED, "requires a user and a password", "set both", ends=False)
        if self._login is None or self._login.done():
            self._login = start_task(self._log_in(self._credentials))
        await asyncio.wait({self._login})
        self._login.result()

    async def _log_in(self, credentials: Credentials) -> None:
        self._token = None
        try:
            answer = await self._exchange(messages.AUTHENTICATE, messages.encode_authenticate(*credentials))
        except MemberTrouble as trouble:
            if trouble.outcome is not RequestOutcome.NO_USERS:
                raise
            return  # as in etcd's own clients: a password is optional for anybody with full access
        self._token = messages.decode_token(answer)

    async def ask(self, method: Method, request: bytes) -> bytes:
        """Send a request and wait for the answer without a limit. Raises MemberTrouble if no answer arrives."""
        return await shielded(self._exchange(method, request))

    @contextlib.asynccontextmanager
    async def stream(self, method: Method) -> AsyncIterator[Stream[bytes, bytes]]:
        """A bidirectional stream until the end of the block; use it in a separate task.

        Raises:
            MemberTrouble: the stream cannot be opened, or ends.
        """
        call = StreamStreamMethod(self._channel, method.path, bytes, bytes)
        with self._as_trouble():
            async with call.open(metadata=self._metadata()) as stream:
                try:
                    yield stream
                finally:
                    if not self.closed:
                        with contextlib.suppress(Exception):
                            await stream.cancel()

    async def _exchange(self, method: Method, request: bytes) -> bytes:
        with self._as_trouble():
            if method.both_stream:
                answers = await StreamStreamMethod(self._channel, method.path, bytes, bytes)(
                    [request], metadata=self._metadata()
                )
                if not answers:
                    raise self.trouble(RequestOutcome.RETRY, "ended a stream without an answer")
                answer = answers[0]
            else:
                answer = await UnaryUnaryMethod(self._channel, method.path, bytes, bytes)(
                    request, metadata=self._metadata()
                )
        self.note_heard()
        return answer

    def _metadata(self) -> dict[str, str | bytes]:
        metadata: dict[str, str | bytes] = {"hasleader": "true"}  # a member that is cut off from the others reports it
        if self._token is not None:
            metadata["token"] = self._token
        return metadata

    def note_heard(self) -> None:
        """Note that the member sent something."""
        self.heard_at = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def _as_trouble(self) -> Iterator[None]:
        """Turn any error in the block into a `MemberTrouble`."""
        try:
            yield
        except MemberTrouble:
            raise
        except GRPCError as error:
            self.note_heard()
            text = error.message or error.status.name.lower()
            diagnosis = classify(error.status.value, text, self._credentials is not None)
            raise MemberTrouble(self.endpoint, diagnosis, ends=False) from None
        except ssl.SSLCertVerificationError as error:
            problem = f"has a certificate that cannot be trusted ({error.verify_message})"
            raise self.trouble(
                RequestOutcome.REFUSED, problem, "check `cacert`, and the name in the endpoint"
            ) from None
        except ssl.SSLError as error:
            problem = f"does not answer over TLS ({_ssl_reason(error)})"
            raise self.trouble(RequestOutcome.REFUSED, problem, "check the protocol, `cert` and `key`") from None
        except StreamTerminatedError as error:
            raise self.trouble(RequestOutcome.RETRY, f"ended the connection ({error})", broke=True) from None
        except DecodingError as error:
            raise self.trouble(
                RequestOutcome.REFUSED, f"sent a reply that is not from etcd ({error})", "check the endpoint"
            ) from None
        except OSError as error:
            broken = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            remedy = "check whether it speaks TLS" if self._tls and broken else ""
            raise self.trouble(RequestOutcome.RETRY, f"cannot be reached ({_reason(error)})", remedy) from None
        except Exception as error:  # grpclib and h2 pass on any error caused by the peer's data
            problem = f"broke the connection ({type(error).__name__}: {error})"
            raise self.trouble(RequestOutcome.RETRY, problem, broke=True) from error
        finally:
            if self.closed:  # closed while connecting, which closing the channel does not prevent
                self._channel.close()

    def trouble(
        self, outcome: RequestOutcome, problem: str, remedy: str = "", *, ends: bool = True, broke: bool = False
    ) -> MemberTrouble:
        """Create an error of this member."""
        return MemberTrouble(self.endpoint, Diagnosis(outcome, problem, remedy), ends, broke)

    async def _diagnose(self, trouble: MemberTrouble, timeout_s: float) -> MemberTrouble:
        """Find a permanent reason, if there is one, why the connection broke before any use."""
        service = await _detect_service(self.endpoint, self._tls, timeout_s)
        if service is None:
            remedy = "check whether it requires TLS" if self._tls is None else trouble.diagnosis.remedy
            return self.trouble(RequestOutcome.RETRY, trouble.diagnosis.problem, remedy)
        return self.trouble(RequestOutcome.REFUSED, *service)

    def close(self) -> None:
        """End the connection; waiting requests fail. Idempotent."""
        if not self.closed:
            self.closed = True
            self._channel.close()


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio changes `strerror`
    return error.strerror or str(error) or type(error).__name__


def _ssl_reason(error: ssl.SSLError) -> str:
    """OpenSSL's name of the error, in words."""
    return (error.reason or str(error)).lower().replace("_", " ")


# Identifies the service behind a broken connection, whose data gRPC hides: opens another with HTTP/2's first bytes, and
# examines the first answer.

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The preface, and empty settings (RFC 9113, section 3.4)."""
_SETTINGS = 4
_TLS_ALERT = 0x15
_NOT_ETCD = "check the endpoint"


async def _detect_service(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout_s: float) -> tuple[str, str] | None:
    """Find out why the service there will never speak gRPC with us, and what to do; None if unknown."""
    try:
        async with asyncio.timeout(timeout_s):
            first = await _first_bytes(endpoint, tls)
    except ssl.SSLError as error:
        return (
            f"ended the TLS connection ({_ssl_reason(error)})",
            "check `cert` and `key`, and which authorities the server trusts",
        )
    except (OSError, EOFError):  # TimeoutError is an OSError
        return None
    if first[3] == _SETTINGS:
        return None
    if first[0] == _TLS_ALERT:
        return "requires TLS", "set protocol=https and `cacert`"
    if first.startswith(b"HTTP/1"):
        return "speaks HTTP/1, not the v3 API of etcd", _NOT_ETCD
    return f"does not speak the v3 API of etcd (its first bytes: {first!r})", _NOT_ETCD


async def _first_bytes(endpoint: Endpoint, tls: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
    try:
        writer.write(_HELLO)
        return await reader.readexactly(9)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
