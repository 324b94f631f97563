"""A node's link to the control server over TCP: connect, prove, talk, beat.

Connecting is retried until the deadline, name look-ups included; what cannot get better by waiting (a foreign service,
another job, a wrong secret) ends it at once with one sentence. A server that says nothing for two leases is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import deque

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread, shared_loop
from rallypoint.rendezvous import codec
from rallypoint.rendezvous.frames import MAGIC, FrameError, FrameReader, frame
from rallypoint.rendezvous.handshake import Challenge, ClientHandshake, HandshakeError, Refused, Welcome
from rallypoint.rendezvous.link import Deliver
from rallypoint.rendezvous.messages import Beat, Inquire, JoinRequest, Leave, LinkLost, Request
from rallypoint.rendezvous.probe import answers_as_torch_store

log = get_logger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_CONNECT = 5.0
"""Seconds for one attempt at a TCP connection; the kernel's own patience with a lost packet grows to a minute."""
_SILENCE = 3.0
"""Seconds that a server has to answer a greeting before it is asked whether it is something else."""
_GOODBYE = 1.0
"""Seconds that the last words have to leave."""
_REMIND = 10.0
"""Seconds between two lines that say that the server is out of reach."""


class TcpLink:
    """One session over TCP. Everything after the constructor happens on the loop's thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        job: str,
        local_id: int,
        deliver: Deliver,
        deadline: Deadline,
        *,
        secret: bytes | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        """Begin to connect; returns at once.

        Args:
            endpoint: where the control server listens.
            job: the run id, which the server must share.
            local_id: which handler of this process this is.
            deliver: is handed every notice, `LinkLost` last if the link ends by itself.
            deadline: until when to try to connect.
            secret: the job's, if it has one.
            loop: where to run; the process's shared loop if not given.
        """
        self._endpoint = endpoint
        self._handshake = ClientHandshake(job, secret, os.urandom(16))
        self._local_id = local_id
        self._deliver = deliver
        self._deadline = deadline
        self._loop = loop or shared_loop()
        self._waiting: deque[Request] = deque()
        self._unread: deque[bytes] = deque()  # frames that came with the one that was waited for
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False
        self._suspicions = 0
        self._task = self._loop.submit(self._run())

    def send(self, request: Request) -> None:
        """Say something, now or as soon as the session is open."""
        self._loop.call(lambda: self._send(request))

    def close(self) -> None:
        """Say goodbye, hang up and wait until that is done. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.submit(self._goodbye()).result()

    # On the loop's thread

    def _send(self, request: Request) -> None:
        if self._writer is None:
            if not isinstance(request, Inquire):  # nobody there to ask; that is said while connecting
                self._waiting.append(request)
        elif not self._writer.is_closing():
            self._writer.write(frame(codec.encode(request)))

    def _open(self, writer: asyncio.StreamWriter) -> None:
        """The session is open: say what had to wait. A join that waited has less time left than it was given."""
        self._writer = writer
        while self._waiting:
            request = self._waiting.popleft()
            if isinstance(request, JoinRequest):
                request = request._replace(timeout=min(request.timeout, self._deadline.remaining()))
            self._send(request)

    async def _goodbye(self) -> None:
        if self._writer is not None:
            self._send(Leave())
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._writer.wait_closed(), _GOODBYE)
        self._task.cancel()

    async def _run(self) -> None:
        try:
            reader, writer, frames, welcome = await self._connect()
        except (HandshakeError, TimeoutError) as error:
            self._end(str(error))
            return
        except Exception as error:  # whatever it is, the agent must not wait for ever for what will not come
            log.exception("connecting to %s has come to an end that was not foreseen", self._endpoint)
            self._end(f"no control plane could be reached at {self._endpoint}: {type(error).__name__}: {error}")
            return
        try:
            self._open(writer)
            beats = asyncio.ensure_future(self._beat(writer, welcome.lease))
            try:
                await self._listen(reader, frames, welcome.lease)
            finally:
                beats.cancel()
        except (OSError, FrameError, codec.CodecError, TimeoutError) as error:
            self._end(
                f"the control plane at {self._endpoint} was lost ({_told(error)}); "
                "the node that hosts it has ended or is out of reach: its own output says why"
            )
        finally:
            writer.close()

    def _end(self, sentence: str) -> None:
        if not self._closed:
            self._deliver(LinkLost(sentence))

    async def _listen(self, reader: asyncio.StreamReader, frames: FrameReader, lease: float) -> None:
        while True:
            while self._unread:
                notice = codec.decode_notice(self._unread.popleft())
                if not isinstance(notice, Beat) and not self._closed:
                    self._deliver(notice)
            data = await asyncio.wait_for(reader.read(65536), 2 * lease)
            if not data:
                raise ConnectionResetError("it hung up")
            self._unread.extend(frames.feed(data))

    async def _beat(self, writer: asyncio.StreamWriter, lease: float) -> None:
        beat = frame(codec.encode(Beat()))
        while True:
            await asyncio.sleep(lease / 3)
            if not writer.is_closing():
                writer.write(beat)

    # Connecting

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, FrameReader, Welcome]:
        delay = _FIRST_DELAY
        said_at = asyncio.get_running_loop().time()
        while True:
            try:
                return await asyncio.wait_for(self._attempt(), max(0.1, self._deadline.remaining()))
            except (OSError, TimeoutError, asyncio.IncompleteReadError, codec.CodecError) as error:
                why = _told(error)
            if self._deadline.expired:
                raise TimeoutError(
                    f"no control plane could be reached at {self._endpoint} before the join deadline: {why}; "
                    "check --rdzv-endpoint, and that the node that hosts it has started"
                )
            if asyncio.get_running_loop().time() - said_at >= _REMIND:
                said_at = asyncio.get_running_loop().time()
                log.warning(
                    "waiting for the control plane at %s (%s); giving up in %.0f s",
                    self._endpoint,
                    why,
                    self._deadline.remaining(),
                )
            await asyncio.sleep(min(delay * random.uniform(0.5, 1.0), self._deadline.remaining()))
            delay = min(delay * 1.5, _LONGEST_DELAY)

    async def _attempt(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, FrameReader, Welcome]:
        opening = asyncio.open_connection(self._endpoint.host, self._endpoint.port)
        reader, writer = await asyncio.wait_for(opening, _CONNECT)
        self._unread.clear()
        try:
            address = str(writer.get_extra_info("sockname")[0])
            writer.write(MAGIC + frame(codec.encode(self._handshake.hello(address, os.getpid(), self._local_id))))
            frames = FrameReader()
            answer = codec.decode_answer(await self._answer(reader, frames))
            if isinstance(answer, Challenge):
                writer.write(frame(codec.encode(self._handshake.prove(answer))))
                answer = codec.decode_answer(await self._answer(reader, frames))
            if isinstance(answer, Refused):
                raise HandshakeError(f"the control plane at {self._endpoint} refused this node: {answer.sentence}")
            if not isinstance(answer, Welcome):
                raise self._foreign(f"it answered with a {type(answer).__name__} out of turn")
            return reader, writer, frames, answer
        except BaseException:
            writer.close()
            raise

    async def _answer(self, reader: asyncio.StreamReader, frames: FrameReader) -> bytes:
        """The next frame. What comes with it is kept for the session."""
        while not self._unread:
            try:
                data = await asyncio.wait_for(reader.read(65536), _SILENCE)
            except OSError:  # a reset, or the time is up
                await self._ask_what_it_is()
                raise
            if not data:
                await self._ask_what_it_is()
                raise ConnectionResetError("it hung up during the handshake")
            try:
                self._unread.extend(frames.feed(data))
            except FrameError as error:
                raise self._foreign(str(error)) from None
        return self._unread.popleft()

    async def _ask_what_it_is(self) -> None:
        if not await answers_as_torch_store(self._endpoint):
            return
        # A static job's own port answers so too, and may only have been slow: once is no proof.
        self._suspicions += 1
        if self._suspicions > 1:
            raise self._foreign("it is a torch TCPStore, perhaps of a torchrun job")

    def _foreign(self, what: str) -> HandshakeError:
        return HandshakeError(
            f"what listens at {self._endpoint} is not Rallypoint's control plane: {what}; "
            "give --rdzv-endpoint a port of its own"
        )


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
