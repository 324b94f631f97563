"""The wire format of etcd's v2 API: connections, answers, and the meaning of errors.

A problem that waiting may solve is `EtcdUnreachable`, one that a user has to solve is `EtcdRefused`.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import quote

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.log import printable
from rallypoint.etcd.api import Credentials, EtcdRefused, EtcdTls, EtcdUnreachable

KEY_NOT_FOUND, TEST_FAILED, NODE_EXISTS, UNAUTHORIZED, EVENT_INDEX_CLEARED = 100, 101, 105, 110, 401
"""Error codes of the v2 API."""

CONNECTION_ERRORS = (http.client.RemoteDisconnected, http.client.IncompleteRead)

_RAFT_ERRORS = range(300, 400)
_NUMBERS = range(1 << 63)
"""Indexes and error codes."""
_MAX_BYTES = 64 * 1024 * 1024
"""Bytes of an answer; the state has some MiB at most."""
_DEEPEST = 64
"""Folders in folders that an answer may hold."""


class V2Node(NamedTuple):
    """A key as it is stored; `value` is None for a directory."""

    key: str
    value: str | None
    modified: int
    children: tuple[V2Node, ...] = ()


class V2Response(NamedTuple):
    status: int
    body: Mapping[str, Any]
    """With the number of an error that is not 0, or a node."""
    as_of: int
    endpoint: Endpoint
    sent_again: bool

    @property
    def code(self) -> int:
        return int(self.body.get("errorCode", 0))

    def refusal(self, what: str) -> EtcdRefused | EtcdUnreachable:
        said = f"{self.body.get('message', f'status {self.status}')} ({self.body.get('cause', '')})"
        return EtcdRefused(f"etcd at {self.endpoint} refuses to {what}: {printable(said)}")


class V2Dialer:
    """Makes connections that are up."""

    def __init__(self, tls: EtcdTls | None, timeout: float) -> None:
        self._timeout = timeout
        self._context = None if tls is None else _context(tls)
        self.secure = tls is not None

    def __call__(self, endpoint: Endpoint) -> http.client.HTTPConnection:
        if self._context is None:
            made = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=self._timeout)
        else:
            made = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=self._timeout, context=self._context
            )
        made.connect()
        return made


def _context(tls: EtcdTls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.cacert)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"the CA certificates in {tls.cacert!r} cannot be used: {error}; give a PEM file") from None
    if tls.cert is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except (OSError, ssl.SSLError) as error:
            files = tls.cert if tls.key is None else f"{tls.cert} and {tls.key}"
            raise UserError(
                f"the certificate and key in {files} cannot be used: {error}; give PEM files that belong together"
            ) from None
    return context


def headers_of(credentials: Credentials | None) -> dict[str, str]:
    if credentials is None:
        return {}
    text = f"{credentials.user}:{credentials.password}".encode()
    return {"Authorization": f"Basic {base64.b64encode(text).decode()}"}


def path_of(key: str) -> str:
    return "/v2/keys/" + quote(key.lstrip("/"), safe="/")


def node_of(body: Mapping[str, Any]) -> V2Node:
    return V2Node(
        str(body.get("key", "/")),
        None if body.get("dir") else str(body.get("value", "")),
        int(body.get("modifiedIndex", 0)),
        tuple(node_of(each) for each in body.get("nodes", ())),
    )


def body_of(endpoint: Endpoint, response: http.client.HTTPResponse) -> bytes:
    """All bytes of an answer. Raises EtcdRefused if they are more than etcd's can be, and what `http.client` does."""
    data = response.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise EtcdRefused(
            f"what listens at {endpoint} is not etcd: its answer has more than {_MAX_BYTES} bytes; check the endpoint"
        )
    if response.length:  # the end came before it
        raise http.client.IncompleteRead(data, response.length)
    return data


def read(endpoint: Endpoint, response: http.client.HTTPResponse, data: bytes) -> V2Response:
    """An answer of etcd's v2 API. Raises EtcdUnreachable or EtcdRefused for what is none, or no answer yet."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if response.status >= 500 or (_is_answer(body) and body.get("errorCode") in _RAFT_ERRORS):
        said = body.get("message") if isinstance(body, dict) else data[:80].decode(errors="replace").strip()
        words = printable(str(said)) if said else f"status {response.status}"
        raise EtcdUnreachable(f"etcd at {endpoint} cannot answer now ({words})", True)
    if not _is_answer(body) or body.get("errorCode") == UNAUTHORIZED:
        raise EtcdRefused(_no_v2_error(endpoint, response.status, data))
    try:
        index = int(response.getheader("X-Etcd-Index") or body.get("index", 0))
    except ValueError:
        index = 0
    return V2Response(response.status, body, index if index in _NUMBERS else 0, endpoint, False)


def _is_answer(body: object) -> TypeGuard[dict[str, Any]]:
    """Whether it says what was wrong, or has a node; with fields of the types and in the ranges that etcd's have."""
    if not isinstance(body, dict) or not all(_is_number(body.get(name, 0)) for name in ("errorCode", "index")):
        return False
    return bool(body.get("errorCode")) or _is_node(body.get("node"), _DEEPEST)


def _is_node(node: object, deepest: int) -> bool:
    return (
        deepest > 0
        and isinstance(node, dict)
        and all(isinstance(node.get(name, ""), str) for name in ("key", "value"))
        and _is_number(node.get("modifiedIndex", 0))
        and isinstance(node.get("nodes", []), list)
        and all(_is_node(each, deepest - 1) for each in node.get("nodes", []))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and value in _NUMBERS


def _no_v2_error(endpoint: Endpoint, status: int, data: bytes) -> str:
    text = data[:80].decode(errors="replace").strip()
    if b"HTTP request to an HTTPS server" in data:
        return f"etcd at {endpoint} speaks only TLS; give protocol=https, and ca_cert where it needs one"
    if status == 401:
        return (
            f"etcd at {endpoint} requires a user that is allowed to do this; give the options user and password of one"
        )
    if status == 404:
        return (
            f"what listens at {endpoint} has no v2 API of etcd: use --rdzv-backend=etcd, which needs none "
            "(etcd has had v2 switched off since 3.4, --enable-v2 brings it back, and 3.6 has removed it)"
        )
    return f"what listens at {endpoint} is not etcd: it answers with status {status} and {text!r}; check the endpoint"


def error_for(endpoint: Endpoint, error: Exception, secure: bool, *, sent: bool) -> EtcdUnreachable | EtcdRefused:
    """The error for a failed exchange."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return EtcdRefused(
            f"the certificate of etcd at {endpoint} cannot be trusted ({error.verify_message}); "
            "give the CA that has signed it as ca_cert, and the name that it is for as the endpoint"
        )
    if isinstance(error, (*CONNECTION_ERRORS, ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)):
        if secure and not sent:
            return EtcdUnreachable(f"etcd at {endpoint} does not answer TLS; if it speaks none, give protocol=http")
        hint = "" if secure else "; if it speaks only TLS, give protocol=https"
        return EtcdUnreachable(f"etcd at {endpoint} closes the connection without an answer{hint}", sent)
    if isinstance(error, ssl.SSLError):
        reason = str(error.reason or error)
        if "ALERT" in reason:
            return EtcdRefused(
                f"etcd at {endpoint} does not accept this node's certificate ({reason.lower().replace('_', ' ')}); "
                "give one that it trusts as ssl_cert, with its key as ssl_cert_key"
            )
        return EtcdRefused(f"what listens at {endpoint} speaks no TLS ({reason.lower()}); give protocol=http")
    if isinstance(error, http.client.HTTPException):
        return EtcdRefused(
            f"what listens at {endpoint} does not answer as etcd does ({type(error).__name__}); check the endpoint"
        )
    if isinstance(error, TimeoutError):
        return EtcdUnreachable(f"etcd at {endpoint} does not answer", sent)
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return EtcdUnreachable(f"no etcd answers at {endpoint} ({words})", sent)
