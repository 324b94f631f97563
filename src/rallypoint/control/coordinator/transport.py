"""The sockets of a control server's connections: one epoll set, which the event loop watches as one file.

Replaces the event loop's transports, which took a fifth of the cost of a node's first round (decision 22). Laws:

1. Everything here runs on the loop's thread. Other users of the loop wait at most for a limited number of events.
2. A connection is notified once of its end, and never from within its own call.
3. A defect in a connection's code ends only that connection.
4. A peer that reads nothing cannot keep a connection open: a closing connection gets some seconds to send the rest.
5. Without events there are no wake-ups, however many connections are open.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from select import EPOLLIN, EPOLLOUT
from typing import Any, Protocol

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.log import get_logger

log = get_logger(__name__)

_AT_ONCE = 64
"""Events to handle, and connections to accept per event, before others have their turn."""
_MANY = 256
"""Number of connections above which events that are close together are handled together, since one wake-up each would
double the cost."""
_REST = 0.004
"""Seconds within which they are handled together. Events that are further apart each wake the loop."""
_LOOKS_FOR = 1024
"""Number of connections per additional look that may find nothing before the set is watched again."""
_READ = 65536
"""Bytes read at once."""
_RETRY = 1.0
"""Seconds without accepting after the kernel refuses it for lack of descriptors or memory."""
_LAST_WORDS = 10.0
"""Seconds for a peer to read the rest after the connection is closed."""


class Receiver(Protocol):
    """A connection, which receives the events of its transport."""

    def data_received(self, data: bytes) -> None:
        """Handle bytes that arrived."""

    def all_sent(self) -> None:
        """Note that the waiting output was sent: the peer read the earlier output."""

    def connection_lost(self, error: OSError | None) -> None:
        """Handle the transport's end; `error` is None if either side closed it."""


class Transports:
    """All transports of one server, and its listeners.

    Args:
        accepted: creates the connection for a new transport.
        log_refusal: logs that accepting pauses.
    """

    def __init__(self, accepted: Callable[[Transport], Receiver], log_refusal: Callable[..., None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._accepted = accepted
        self._log_refusal = log_refusal
        self._epoll = select.epoll()
        self._listeners: dict[int, socket.socket] = {}
        self._transports: dict[int, Transport] = {}
        """Transports that are waiting for events, by descriptor."""
        self._rest: asyncio.TimerHandle | None = None
        self._is_watched = False
        """Whether the loop is waiting for the set's events, rather than for a time."""
        self._empty_looks = 0
        """How many consecutive looks found nothing."""
        self.turn_began = SYSTEM_CLOCK.monotonic()
        """When the last look for events was."""
        self._wait(0, self.turn_began)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections until `stop_listening`."""
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._epoll.register(listener, EPOLLIN)

    def stop_listening(self) -> None:
        """Accept no more connections, and close the listeners. Idempotent."""
        while self._listeners:
            descriptor, listener = self._listeners.popitem()
            with suppress(OSError):  # the set might not be waiting for it now
                self._epoll.unregister(descriptor)
            listener.close()

    def close(self) -> None:
        """Stop: there are no more transports."""
        self.stop_listening()
        if self._rest is not None:
            self._rest.cancel()
        self.loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def watch(self, transport: Transport, before: int, events: int) -> None:
        """Wait for these events of a transport instead of `before`."""
        descriptor = transport.socket.fileno()
        if not events:
            del self._transports[descriptor]
            self._epoll.unregister(descriptor)
        elif before:
            self._epoll.modify(descriptor, events)
        else:
            self._transports[descriptor] = transport
            self._epoll.register(descriptor, events)

    def _wait(self, handled: int, before: float) -> None:
        """Have the loop call again as soon as an event arrives. With many connections and frequent events, call again
        after a rest, or at once if so many were found that more are likely.

        Args:
            handled: the number of events found now.
            before: the time of the previous look, on the monotonic clock.
        """
        # Watching the set again takes time linear in the number of connections, so do not do it for each event:
        #   1. the set is watched, and an event wakes the loop;
        #   2. the next event comes less than a rest later: from now on the loop looks once per rest;
        #   3. a look finds nothing (several looks, with thousands of connections): the set is watched again, and
        #      nothing wakes the loop until the next event.
        count = len(self._transports)
        self._empty_looks = 0 if handled or self._is_watched else self._empty_looks + 1
        is_busy = self.turn_began - before < _REST if self._is_watched else self._empty_looks <= count // _LOOKS_FOR
        rests = count > _MANY and is_busy
        if rests:
            self._rest = self.loop.call_later(_REST if handled < _AT_ONCE else 0.0, self._handle_events)
        if rests and self._is_watched:
            self.loop.remove_reader(self._epoll.fileno())
        elif not rests and not self._is_watched:
            self.loop.add_reader(self._epoll.fileno(), self._handle_events)
        self._is_watched = not rests

    def _handle_events(self) -> None:
        ready = self._epoll.poll(0, _AT_ONCE)
        before, self.turn_began = self.turn_began, SYSTEM_CLOCK.monotonic()
        self._wait(len(ready), before)
        for descriptor, events in ready:
            transport = self._transports.get(descriptor)
            if transport is None:
                self._accept_from(descriptor)
                continue
            try:
                transport.on_events(events)
            except Exception:
                log.exception("an internal error ended a control connection from %s", transport.peer_name[0])
                transport.abort()

    def _accept_from(self, descriptor: int) -> None:
        for _ in range(_AT_ONCE):
            listener = self._listeners.get(descriptor)  # an accepted connection might have stopped us
            if listener is None:
                return
            try:
                accepted, name = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log_refusal("control connections will not be accepted for %g s: %s", _RETRY, error)
                self._epoll.unregister(descriptor)
                self.loop.call_later(_RETRY, self._accept_again, listener)
                return
            accepted.setblocking(False)
            transport = Transport(self, accepted, name)
            transport.open(self._accepted(transport))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() in self._listeners:
            self._epoll.register(listener, EPOLLIN)


class Transport:
    """One accepted connection. Output that cannot be sent at once waits in `unsent`."""

    __slots__ = (
        "_all",
        "_ends_output",
        "_has_ended",
        "_is_paused",
        "_receiver",
        "_watched",
        "is_closing",
        "own_name",
        "peer_name",
        "socket",
        "unsent",
    )

    def __init__(self, transports: Transports, accepted: socket.socket, peer_name: Any) -> None:
        self._all = transports
        self.socket = accepted
        self.own_name, self.peer_name = accepted.getsockname(), peer_name
        """Names of both ends, from the kernel."""
        self.unsent = bytearray()
        self.is_closing = False
        self._receiver: Receiver | None = None
        """The connection, until it is notified of the end."""
        self._has_ended = self._ends_output = self._is_paused = False
        self._watched = 0
        """The events that the set waits for."""

    def open(self, receiver: Receiver) -> None:
        """Begin to read."""
        self._receiver = receiver
        self._watch()

    def write(self, data: bytes) -> None:
        """Send the data as soon as possible; drop it if the transport is closing."""
        if self.is_closing or not data:
            return
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self.socket.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._end(error)
            return
        if sent < len(data):
            self.unsent += data[sent:]
            self._watch()

    def write_eof(self) -> None:
        """End the output after what was written. Idempotent."""
        self._ends_output = True
        if not self.unsent and not self._has_ended:
            with suppress(OSError):  # it is not connected any more; the next read shows that
                self.socket.shutdown(socket.SHUT_WR)

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._is_paused = True
        self._watch()

    def resume(self) -> None:
        """Read again."""
        self._is_paused = False
        self._watch()

    def close(self) -> None:
        """Stop reading, and end the connection once the output is sent. Idempotent."""
        if not self.is_closing:
            self.is_closing = True
            if self.unsent:
                self._watch()
                self._all.loop.call_later(_LAST_WORDS, self._end, None)
            else:
                self._end(None)

    def abort(self) -> None:
        """End the connection now. Idempotent."""
        self._end(None)

    def hand_over(self) -> socket.socket:
        """End this transport but not its socket, which the caller then owns."""
        self._end(None)
        return socket.socket(fileno=self.socket.detach())

    def on_events(self, events: int) -> None:
        """Handle these events, which the set reported."""
        if events & ~EPOLLIN and self._watched & EPOLLOUT:
            self._send_rest()
        if not (events & ~EPOLLOUT and self._watched & EPOLLIN):
            return
        try:
            data = self.socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self.close()
        elif self._receiver is not None:
            self._receiver.data_received(data)

    def _send_rest(self) -> None:
        try:
            del self.unsent[: self.socket.send(self.unsent, socket.MSG_NOSIGNAL)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if self.unsent:
            return
        if self.is_closing:
            self._end(None)
            return
        self._watch()
        if self._ends_output:
            self.write_eof()
        if self._receiver is not None:
            self._receiver.all_sent()

    def _watch(self) -> None:
        """Wait for the events of interest. Without any, leave the set, which always reports errors."""
        events = EPOLLOUT if self.unsent else 0
        if not (self.is_closing or self._is_paused):
            events |= EPOLLIN
        if self._has_ended or events == self._watched:
            return
        self._all.watch(self, self._watched, events)
        self._watched = events

    def _end(self, error: OSError | None) -> None:
        if self._has_ended:
            return
        self.is_closing = True
        self.unsent.clear()
        self._is_paused = True
        self._watch()
        self._has_ended = True
        self._all.loop.call_soon(self._report_end, error)

    def _report_end(self, error: OSError | None) -> None:
        receiver, self._receiver = self._receiver, None
        self.socket.close()
        if receiver is not None:
            receiver.connection_lost(error)
