"""Waiting for a change of a key, by the v2 API's question that stays open until there is one."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint.base.endpoint import Endpoint
from rallypoint.rendezvous.backends.etcd_v2_wire import (
    EVENT_INDEX_CLEARED,
    V2Dialer,
    V2Response,
    body_of,
    error_for,
    node_of,
    path_of,
    read,
)


class LongPoll:
    """One thread's wait for changes of a key. `stop` may be called by another thread."""

    def __init__(self, endpoint: Callable[[], Endpoint], dial: V2Dialer, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._dial = dial
        self._headers = headers
        self._lock = threading.Lock()
        self._stopped = False
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._asked_of: Endpoint | None = None

    def changed(self, key: str, after: int, timeout: float) -> int | None:
        """Wait for a change of a key that came after the index `after`.

        The question stays open at etcd when the time is over: ask again for the same key, as long as it is wanted.

        Returns:
            The index of the change; if etcd does not remember so far back, its index now. None if the time is over.

        Raises:
            EtcdUnreachable: the member does not answer, or has hung up.
            EtcdRefused: it will not do it.
        """
        endpoint = self._endpoint()
        try:
            if self._response is None or self._asked_of != endpoint:
                self._begin(endpoint, f"{path_of(key)}?wait=true&waitIndex={after + 1}")
            if not self._wait_for_body(timeout):
                return None
            answer = self._finish(endpoint)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise error_for(endpoint, error, self._dial.secure, sent=False) from None
        except BaseException:
            self.close()
            raise
        if answer.code == EVENT_INDEX_CLEARED:
            return max(after, int(answer.body.get("index", after)))
        if answer.code:
            raise answer.refusal(f"watch {key!r}")
        return node_of(answer.body["node"]).modified

    def close(self) -> None:
        """Hang up; the next question is asked anew."""
        self._response = None
        with self._lock:
            self._socket = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stop(self) -> None:
        """Have a wait end, and all later ones; for any thread."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Of the plain class: over TLS nothing may be taken apart under the thread that waits.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _begin(self, endpoint: Endpoint, path: str) -> None:
        if self._asked_of != endpoint or self._response is not None:
            self.close()
        if self._connection is None or self._connection.sock is None:
            self._connection = self._dial(endpoint)
        self._asked_of = endpoint
        with self._lock:
            self._socket = self._connection.sock
            if self._stopped:
                raise ConnectionAbortedError("it was stopped")
        self._connection.request("GET", path, headers=self._headers)
        self._response = self._connection.getresponse()  # the head comes at once, the body with the change

    def _wait_for_body(self, timeout: float) -> bool:
        """Whether the body has begun to arrive, or the connection has ended, after so many seconds at most."""
        import select

        assert self._response is not None
        assert self._socket is not None
        sock = self._socket
        body: Any = self._response.fp
        if body is None:  # the answer has none
            return True
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        limit = sock.gettimeout()
        sock.setblocking(False)
        # A plain socket shows nothing both where there is nothing yet and at its end, which alone makes it readable.
        shows_end = isinstance(sock, ssl.SSLSocket)
        try:
            while True:
                try:
                    if body.peek(1) or shows_end:
                        return True
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # TLS had something to say, and etcd has not
                    pass
                if not poller.poll(timeout * 1000):
                    return False
                shows_end = True
        finally:
            sock.settimeout(limit)

    def _finish(self, endpoint: Endpoint) -> V2Response:
        response, self._response = self._response, None
        assert response is not None
        data = body_of(endpoint, response)
        if not data:
            raise ConnectionResetError("it has hung up")
        return read(endpoint, response, data)
