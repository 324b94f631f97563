"""One attempt to open a session with a control server: connect, greet, prove.

What may get better by waiting is an OSError (nobody listens yet, the name does not resolve yet, an answer is late);
what cannot (a foreign service, another job, a wrong secret) is a `HandshakeError` of one sentence.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field

from rallypoint.base.endpoint import Endpoint, quicken
from rallypoint.rendezvous import codec
from rallypoint.rendezvous.frames import MAGIC, FrameError, FrameReader, frame
from rallypoint.rendezvous.handshake import Challenge, ClientHandshake, HandshakeError, Refused, Welcome
from rallypoint.rendezvous.probe import answers_as_torch_store
from rallypoint.rendezvous.state import Settings

_SILENCE = 3.0
"""Seconds that a server has to answer a greeting before it is asked whether it is something else."""

TRY_AGAIN = (OSError, TimeoutError, asyncio.IncompleteReadError, codec.CodecError)
"""What an attempt may raise that the next one need not."""


@dataclass(slots=True)
class Session:
    """An open session. `unread` holds frames that came with the welcome."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    welcome: Welcome
    frames: FrameReader = field(default_factory=FrameReader)
    unread: deque[bytes] = field(default_factory=deque)


class Dialer:
    """Opens sessions of one node with whoever listens at an endpoint."""

    def __init__(self, endpoint: Endpoint, settings: Settings, local_id: int, secret: bytes | None) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._local_id = local_id
        self._secret = secret
        self._suspicions = 0

    async def dial(self, patience: float) -> Session:
        """Try once.

        Args:
            patience: seconds for the TCP connection; the kernel's own grows to minutes.

        Raises:
            HandshakeError: what listens there is of no use to us, and says so.
            OSError, TimeoutError, CodecError: it did not work this time (`TRY_AGAIN`).
        """
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(self._endpoint.host, self._endpoint.port)
        try:
            quicken(writer.get_extra_info("socket"))
            return await self._greet(reader, writer)
        except BaseException:
            writer.close()
            raise

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Session:
        handshake = ClientHandshake(self._settings.run_id, self._secret, os.urandom(16), self._settings)
        frames, unread = FrameReader(), deque[bytes]()
        address = str(writer.get_extra_info("sockname")[0])
        writer.write(MAGIC + frame(codec.encode(handshake.hello(address, os.getpid(), self._local_id))))
        answer = codec.decode_answer(await self._answer(reader, frames, unread))
        if isinstance(answer, Challenge):
            writer.write(frame(codec.encode(handshake.prove(answer))))
            answer = codec.decode_answer(await self._answer(reader, frames, unread))
        if isinstance(answer, Refused):
            raise HandshakeError(f"the control plane at {self._endpoint} refused this node: {answer.sentence}")
        if not isinstance(answer, Welcome):
            raise self._foreign(f"it answered with a {type(answer).__name__} out of turn")
        return Session(reader, writer, answer, frames, unread)

    async def _answer(self, reader: asyncio.StreamReader, frames: FrameReader, unread: deque[bytes]) -> bytes:
        """The next frame. What comes with it is kept for the session."""
        while not unread:
            try:
                async with asyncio.timeout(_SILENCE):
                    data = await reader.read(65536)
            except OSError:  # a reset, or the time is up
                await self._ask_what_it_is()
                raise
            if not data:
                await self._ask_what_it_is()
                raise ConnectionResetError("it hung up during the handshake")
            try:
                unread.extend(frames.feed(data))
            except FrameError as error:
                raise self._foreign(str(error)) from None
        return unread.popleft()

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
