"""One member of the cluster, over one connection: login, requests, streams, and whether it is still there.

Laws:

- a silent member is detected: while a request waits, its status is queried, and if that is not answered either, all
  waiting requests get an error (a paused process or a cut link does not end the connection);
- what went wrong is raised as a `MemberTrouble`, which knows whether the request may have been done;
- after a trouble that `ends` it, a member is of no further use: open a new one.

All of it runs on the loop. grpclib is imported by this module only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

from grpclib.client import Channel, Stream, StreamStreamMethod, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError

from rallypoint.base.endpoint import Endpoint
from rallypoint.etcd import messages, service_detection
from rallypoint.etcd.api import Credentials
from rallypoint.etcd.error_classes import Diagnosis, RequestOutcome, classify
from rallypoint.etcd.messages import Method
from rallypoint.etcd.protobuf import DecodingError
from rallypoint.etcd.tasks import shielded, start_task

PROBE_AFTER = 0.4
"""Seconds that a request waits before the member is asked whether it is still there."""
IDLE_PROBE_AFTER = 1.1
"""Seconds that a stream on which nothing need come waits before that: no longer than a lease of 3 s is kept silent."""
PROBE_TIMEOUT = 0.6
"""Seconds that a member has to say that it is still there, and to take a new connection; more where all are slow."""


class MemberTrouble(Exception):
    """Something went wrong with a member. `ends` is whether the connection is of no further use."""

    def __init__(self, endpoint: Endpoint, diagnosis: Diagnosis, ends: bool) -> None:
        super().__init__(f"{endpoint} {diagnosis.problem}")
        self.endpoint = endpoint
        self.diagnosis = diagnosis
        self.ends = ends

    @property
    def outcome(self) -> RequestOutcome:
        """Whether the request may have been done."""
        return self.diagnosis.outcome


class _Bytes(CodecBase):
    """Messages are made and read by `messages`."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


class Member:
    """A connection to one member. Made by `open_member`, ended by `close`."""

    def __init__(
        self, endpoint: Endpoint, tls: ssl.SSLContext | None, credentials: Credentials | None, timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self._connect_timeout = timeout_s
        self.closed = False
        self._credentials = credentials
        self._tls = tls
        self._channel = Channel(endpoint.host, endpoint.port, codec=_Bytes(), ssl=tls)
        self._token: str | None = None
        self._heard_at = 0.0
        self._probe: asyncio.Task[bool] | None = None
        self._login: asyncio.Task[None] | None = None

    async def greet(self) -> None:
        """Connect, and see that this is a member that can be used. Raises MemberTrouble if it is not."""
        try:
            async with asyncio.timeout(self._connect_timeout):
                await shielded(self._greet())
        except TimeoutError:
            raise self._trouble(RequestOutcome.NOT_DONE, f"did not answer within {self._connect_timeout:g} s") from None
        except MemberTrouble as trouble:
            if trouble.outcome is RequestOutcome.UNKNOWN:  # nothing was asked for that could have been done
                raise await self._diagnose(trouble) from None
            raise

    async def _greet(self) -> None:
        if self._credentials is not None:
            await self._log_in(self._credentials)
        try:
            status = messages.decode_status(await self._exchange(messages.STATUS, b""))
        except MemberTrouble as trouble:
            if trouble.outcome is not RequestOutcome.REFUSED or trouble.ends or self._credentials is not None:
                raise
            return  # it knows its users and does not say more; what it is asked for next shows who may do that
        if not status.leader:
            raise self._trouble(RequestOutcome.NOT_DONE, "has no leader", "see whether most of its members run")

    async def log_in(self) -> None:
        """Fetch a new token, once for all who ask at the same time.

        Raises:
            MemberTrouble: the user is refused, or the member is gone.
        """
        if self._credentials is None:
            raise self._trouble(RequestOutcome.REFUSED, "requires a user and a password", "give both", ends=False)
        if self._login is None or self._login.done():
            self._login = start_task(self._log_in(self._credentials))
        await self._until(self._login)
        self._login.result()

    async def _log_in(self, credentials: Credentials) -> None:
        self._token = None
        try:
            answer = await self._exchange(messages.AUTHENTICATE, messages.encode_authenticate(*credentials))
        except MemberTrouble as trouble:
            if trouble.outcome is not RequestOutcome.NO_USERS:
                raise
            return  # as etcd's own clients do: whoever may do everything may also give a password
        self._token = messages.decode_token(answer)

    async def ask(self, method: Method, request: bytes) -> bytes:
        """The answer to one request, however long it takes; the caller sets the limit.

        Raises:
            MemberTrouble: there is none.
        """
        task = start_task(self._exchange(method, request))
        try:
            await self._until(task)
            return task.result()
        finally:
            task.cancel()

    async def _until(self, task: asyncio.Task[Any]) -> None:
        """Wait for it, as long as the member is there."""
        while not (await asyncio.wait({task}, timeout=PROBE_AFTER))[0]:
            await self.check(task)

    async def check(self, waiting: asyncio.Task[Any]) -> None:
        """Make sure that the member is still there while `waiting` is; returns at once when that is done.

        Raises:
            MemberTrouble: it says nothing any more.
        """
        if self._probe is None or self._probe.done():
            self._probe = start_task(self._answers())
        probe = self._probe
        await asyncio.wait({waiting, probe}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and not probe.result():
            self.close()
            raise self._trouble(
                RequestOutcome.UNKNOWN, f"has been silent for {PROBE_AFTER + self._connect_timeout:.1f} s"
            )

    async def _answers(self) -> bool:
        """Whether the member answers anything at all, be it that we may not know."""
        asked = asyncio.get_running_loop().time()
        task = start_task(self._exchange(messages.STATUS, b""))
        try:
            for _ in range(2):  # in two parts: had this process itself been asleep, the first would be over at once
                if (await asyncio.wait({task}, timeout=self._connect_timeout / 2))[0]:
                    self._connect_timeout = max(PROBE_TIMEOUT, 2 * (asyncio.get_running_loop().time() - asked))
                    failure = task.exception()
                    return not (isinstance(failure, MemberTrouble) and failure.ends)
            return False
        finally:
            task.cancel()

    def seconds_silent(self) -> float:
        """Seconds since it said anything."""
        return asyncio.get_running_loop().time() - self._heard_at

    @contextlib.asynccontextmanager
    async def stream(self, method: Method) -> AsyncIterator[MemberStream]:
        """A stream on which both sides say what they like, until the block is left.

        Raises:
            MemberTrouble: it cannot be opened.
        """
        call = StreamStreamMethod(self._channel, method.path, bytes, bytes)
        with self._as_trouble():
            async with call.open(metadata=self._metadata()) as stream:
                try:
                    yield MemberStream(self, stream)
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
                    raise self._trouble(RequestOutcome.UNKNOWN, "ended a stream without an answer")
                answer = answers[0]
            else:
                answer = await UnaryUnaryMethod(self._channel, method.path, bytes, bytes)(
                    request, metadata=self._metadata()
                )
        self.note_heard()
        return answer

    def _metadata(self) -> dict[str, str | bytes]:
        metadata: dict[str, str | bytes] = {"hasleader": "true"}  # a member that is cut off from the others says so
        if self._token is not None:
            metadata["token"] = self._token
        return metadata

    def note_heard(self) -> None:
        """It has said something."""
        self._heard_at = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def _as_trouble(self) -> Iterator[None]:
        """Whatever goes wrong in the block, as a `MemberTrouble`."""
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
            problem = f"has a certificate that is not to be trusted ({error.verify_message})"
            raise self._trouble(
                RequestOutcome.REFUSED, problem, "check `cacert`, and the name in the endpoint"
            ) from None
        except ssl.SSLError as error:
            problem = f"cannot be spoken to over TLS ({service_detection.ssl_reason(error)})"
            raise self._trouble(RequestOutcome.REFUSED, problem, "check the protocol, `cert` and `key`") from None
        except StreamTerminatedError as error:
            raise self._trouble(RequestOutcome.UNKNOWN, f"ended the connection ({error})") from None
        except DecodingError as error:
            raise self._trouble(
                RequestOutcome.REFUSED, f"said what etcd does not say ({error})", "check the endpoint"
            ) from None
        except OSError as error:
            broken = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            remedy = "see whether it speaks TLS" if self._tls and broken else ""
            raise self._trouble(RequestOutcome.NOT_DONE, f"cannot be reached ({_reason(error)})", remedy) from None
        except Exception as error:  # grpclib and h2 let through whatever they trip over in what the other side sends
            problem = f"broke the connection ({type(error).__name__}: {error})"
            raise self._trouble(RequestOutcome.UNKNOWN, problem) from error
        finally:
            if self.closed:  # while this was still connecting, which closing the channel does not prevent
                self._channel.close()

    def _trouble(self, outcome: RequestOutcome, problem: str, remedy: str = "", ends: bool = True) -> MemberTrouble:
        return MemberTrouble(self.endpoint, Diagnosis(outcome, problem, remedy), ends)

    async def _diagnose(self, trouble: MemberTrouble) -> MemberTrouble:
        """The connection broke before it was of any use: a reason that waiting will not change, if there is one."""
        found = await service_detection.detect_service(self.endpoint, self._tls, self._connect_timeout)
        if found is None:
            remedy = "see whether it requires TLS" if self._tls is None and trouble.ends else trouble.diagnosis.remedy
            return self._trouble(RequestOutcome.NOT_DONE, trouble.diagnosis.problem, remedy)
        return self._trouble(RequestOutcome.REFUSED, found.problem, found.remedy)

    def close(self) -> None:
        """End the connection; waiting requests get an error. Idempotent."""
        if not self.closed:
            self.closed = True
            self._channel.close()


class MemberStream:
    """A stream of `Member.stream`."""

    def __init__(self, member: Member, stream: Stream[bytes, bytes]) -> None:
        self._member = member
        self._stream = stream

    async def send(self, message: bytes) -> None:
        """Say something."""
        await self._stream.send_message(message)

    async def receive(self) -> bytes | None:
        """The next thing that the member says, None at the end; waits as long as the member is there.

        Raises:
            MemberTrouble: it is gone, or says nothing any more when asked.
        """
        task = start_task(self._stream.recv_message())
        try:
            while True:
                wait = max(IDLE_PROBE_AFTER - self._member.seconds_silent(), 0.05)
                if (await asyncio.wait({task}, timeout=wait))[0]:
                    self._member.note_heard()
                    return task.result()
                if self._member.seconds_silent() >= IDLE_PROBE_AFTER:
                    await self._member.check(task)
        finally:
            task.cancel()


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio puts other words into `strerror`
    return error.strerror or str(error) or type(error).__name__


async def open_member(
    endpoint: Endpoint, tls: ssl.SSLContext | None, credentials: Credentials | None, timeout_s: float
) -> Member:
    """A member that is there, has a leader and knows us.

    Raises:
        MemberTrouble: it is not, within `timeout_s` seconds.
    """
    member = Member(endpoint, tls, credentials, timeout_s)
    try:
        await member.greet()
    except BaseException:
        member.close()
        raise
    return member
