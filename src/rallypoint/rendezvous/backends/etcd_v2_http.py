"""The v2 API of etcd over HTTP (etcd up to 3.5 with `--enable-v2`): read, compare and set, delete.

Laws:

1. Each request has a deadline at each member, and goes to the next member when one does not answer.
2. A request that changes something is sent again only where its condition lets it happen once (`if_index`, `if_new`).
   Whether it was sent before without an answer is in `V2Written.sent_again`: a refusal may then come from its own first
   sending, and what is stored tells.

A client is for one thread; `long_poll` gives something with a connection of its own, for another.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from rallypoint.base.endpoint import Endpoint
from rallypoint.etcd.api import Credentials, EtcdRefused, EtcdTls, EtcdUnreachable
from rallypoint.rendezvous.backends.etcd_v2_wire import (
    CONNECTION_ERRORS,
    EVENT_INDEX_CLEARED,
    KEY_NOT_FOUND,
    NODE_EXISTS,
    TEST_FAILED,
    V2Dialer,
    V2Node,
    V2Response,
    body_of,
    error_for,
    headers_of,
    node_of,
    path_of,
    read,
)

_SHORT_TIMEOUT = 2.0
"""Seconds that a member may take where there are others to ask."""


class V2Read(NamedTuple):
    """The answer to a read: what is there, or None, as of etcd's index `as_of`."""

    node: V2Node | None
    as_of: int


class V2Written(NamedTuple):
    """The answer to a write with a condition: the node as written, or None where the condition does not hold.

    `sent_again`: see law 2. `there` is False where `if_index` was asked of a key that is not there.
    """

    node: V2Node | None
    there: bool
    sent_again: bool


class EtcdV2Client:
    """The members of one etcd cluster.

    Args:
        endpoints: the members; one that answers is asked on.
        tls: None for plain HTTP.
        credentials: None where etcd knows no users.
        timeout: seconds that a request may take at one member; less where there are others to ask.

    Raises:
        UserError: a file of `tls` cannot be used.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        tls: EtcdTls | None = None,
        credentials: Credentials | None = None,
        timeout: float = 5.0,
    ) -> None:
        self._endpoints = list(endpoints)
        self._dial = V2Dialer(tls, min(timeout, _SHORT_TIMEOUT) if len(self._endpoints) > 1 else timeout)
        self._headers = headers_of(credentials)
        self._current_member = 0
        self._connection: http.client.HTTPConnection | None = None

    def clone(self) -> EtcdV2Client:
        """Another client of the same cluster, for another thread."""
        twin = object.__new__(EtcdV2Client)
        vars(twin).update(vars(self), _connection=None)
        return twin

    @property
    def endpoint(self) -> Endpoint:
        """The member that is asked first."""
        return self._endpoints[self._current_member]

    def get(self, key: str, *, quorum: bool = False) -> V2Read:
        """Read a key; a directory is returned with its contents.

        Args:
            key: such as `/a/b`.
            quorum: whether the cluster must agree on the answer; otherwise the queried member may lag behind.

        Raises:
            EtcdUnreachable: no member answers.
            EtcdRefused: the cluster, or what is at the endpoint, will not do it.
        """
        answer = self._ask("GET", path_of(key) + ("?quorum=true" if quorum else ""))
        if answer.code == KEY_NOT_FOUND:
            return V2Read(None, answer.as_of)
        if answer.code:
            raise answer.refusal(f"read {key!r}")
        return V2Read(node_of(answer.body["node"]), answer.as_of)

    def put(
        self,
        key: str,
        value: str,
        *,
        ttl: int | None = None,
        if_index: int | None = None,
        if_new: bool = False,
        repeatable: bool = False,
    ) -> V2Written:
        """Store a value.

        Args:
            key: such as `/a/b`; directories above it are made.
            value: any text.
            ttl: seconds after which it goes away unless it is written again; None for never.
            if_index: only if the key was last changed at this index.
            if_new: only if the key is not there.
            repeatable: it may happen twice also without a condition.

        Raises:
            EtcdUnreachable: no member answers; the value may have been stored.
            EtcdRefused: the cluster, or what is at the endpoint, will not do it.
        """
        fields = {"value": value}
        if ttl is not None:
            fields["ttl"] = str(ttl)
        if if_index is not None:
            fields["prevIndex"] = str(if_index)
        if if_new:
            fields["prevExist"] = "false"
        repeatable = repeatable or if_new or if_index is not None
        answer = self._ask("PUT", path_of(key), urlencode(fields), repeatable=repeatable)
        if not answer.code:
            return V2Written(node_of(answer.body["node"]), True, answer.sent_again)
        if answer.code in (TEST_FAILED, NODE_EXISTS, KEY_NOT_FOUND):
            return V2Written(None, answer.code != KEY_NOT_FOUND, answer.sent_again)
        raise answer.refusal(f"write {key!r}")

    def delete(self, key: str) -> bool:
        """Remove a value; whether it was there.

        Raises:
            EtcdUnreachable: no member answers; the value may have been removed.
            EtcdRefused: the cluster, or what is at the endpoint, will not do it.
        """
        answer = self._ask("DELETE", path_of(key), repeatable=False)
        if answer.code not in (0, KEY_NOT_FOUND):
            raise answer.refusal(f"delete {key!r}")
        return not answer.code

    def long_poll(self) -> LongPoll:
        """Something that waits for changes, for another thread; it asks the member that this client asks."""
        return LongPoll(lambda: self.endpoint, self._dial, self._headers)

    def close(self) -> None:
        """Disconnect. The client can be used on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Inside

    def _ask(self, method: str, path: str, form: str | None = None, *, repeatable: bool = True) -> V2Response:
        """Ask one member after the other until one has an answer; raises what all of them together mean."""
        faults: list[EtcdUnreachable | EtcdRefused] = []
        for _ in self._endpoints:
            try:
                answer = self._ask_one(method, path, form, repeatable)
                return answer._replace(sent_again=answer.sent_again or any(map(_outcome_unknown, faults)))
            except (EtcdUnreachable, EtcdRefused) as fault:
                self.close()
                faults.append(fault)
                self._current_member = (self._current_member + 1) % len(self._endpoints)
                if not repeatable and _outcome_unknown(fault):
                    break
        words = "; ".join(str(fault) for fault in faults)
        if all(isinstance(fault, EtcdRefused) for fault in faults):
            raise EtcdRefused(words)
        raise EtcdUnreachable(words, any(map(_outcome_unknown, faults)))

    def _ask_one(self, method: str, path: str, form: str | None, repeatable: bool) -> V2Response:
        endpoint = self.endpoint
        changes, sent_again = method != "GET", False
        kept = self._connection
        if kept is not None:
            try:
                return self._exchange(kept, endpoint, method, path, form)
            except (
                ConnectionError,
                *CONNECTION_ERRORS,
            ) as error:  # such a one may have been closed while nobody used it
                self.close()
                if changes and not repeatable:
                    raise EtcdUnreachable(f"etcd at {endpoint} has disconnected ({error})", True) from None
                sent_again = changes
            except (OSError, http.client.HTTPException) as error:
                raise error_for(endpoint, error, self._dial.secure, sent=True) from None
        sent = False
        try:
            connection = self._connection = self._dial(endpoint)
            sent = True
            return self._exchange(connection, endpoint, method, path, form)._replace(sent_again=sent_again)
        except (OSError, http.client.HTTPException) as error:
            raise error_for(endpoint, error, self._dial.secure, sent=sent or sent_again) from None

    def _exchange(
        self, connection: http.client.HTTPConnection, endpoint: Endpoint, method: str, path: str, form: str | None
    ) -> V2Response:
        headers = dict(self._headers)
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, form, headers)
        response = connection.getresponse()
        return read(endpoint, response, body_of(endpoint, response))


class LongPoll:
    """One thread's wait for changes of a key, by the v2 API's request that is answered only when there is one."""

    def __init__(self, endpoint: Callable[[], Endpoint], dial: V2Dialer, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._dial = dial
        self._headers = headers
        self._lock = threading.Lock()
        self._stopped = False
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._asked_of: Endpoint | None = None

    def changed(self, key: str, after: int, timeout: float) -> int | None:
        """Wait for a change of a key that came after the index `after`.

        Returns:
            The index of the change; if etcd does not remember so far back, its index now. None after `timeout` seconds.

        Raises:
            EtcdUnreachable: the member does not answer, or has disconnected.
            EtcdRefused: it will not do it.
        """
        endpoint = self._endpoint()
        try:
            connection = self._connect(endpoint, timeout)
            try:
                connection.request("GET", f"{path_of(key)}?wait=true&waitIndex={after + 1}", headers=self._headers)
                response = connection.getresponse()
                data = body_of(endpoint, response)
            except TimeoutError:
                self.close()
                return None
            if not data:
                raise ConnectionResetError("it has closed the connection")
            answer = read(endpoint, response, data)
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
        """Disconnect; the next wait connects again."""
        with self._lock:
            self._socket = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stop(self) -> None:
        """End a wait, and all later ones; from any thread."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Of the plain class: over TLS nothing may be taken apart under the thread that waits.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _connect(self, endpoint: Endpoint, timeout: float) -> http.client.HTTPConnection:
        """A connection to the member, kept from the wait before where there is one; its waits end after `timeout`."""
        if self._asked_of != endpoint or self._connection is None or self._connection.sock is None:
            self.close()
            self._connection, self._asked_of = self._dial(endpoint), endpoint
        with self._lock:
            self._socket = self._connection.sock
            if self._stopped:
                raise ConnectionAbortedError("it was stopped")
        self._connection.sock.settimeout(max(0.001, timeout))
        return self._connection


def _outcome_unknown(fault: EtcdUnreachable | EtcdRefused) -> bool:
    return isinstance(fault, EtcdUnreachable) and fault.outcome_unknown
