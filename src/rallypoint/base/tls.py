"""TLS for the control plane: both sides present a certificate. Changed files are reloaded.

Laws:

1. Each side requires from the other a certificate signed by `ca`. No mode works without one.
2. With `peer`, the other side's certificate must name that identity as a URI (spiffe://...) or a DNS name. Without it,
   a node checks that the certificate names the endpoint's host, and the coordinator accepts every certificate signed by
   `ca`.
3. Renewed certificates apply from the next connection on. Files that cannot be loaded are reported and change nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from ssl import SSLContext

log = get_logger(__name__)


class TlsFiles(NamedTuple):
    """Paths of PEM files, and the identity that the peer must have (empty: see law 2)."""

    cert: str
    key: str
    ca: str
    peer: str = ""


class ControlTls:
    """Contexts for one side's connections. Raises UserError if a file cannot be loaded, or if certificate and key do
    not match."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._files_state = _state(files)
        self._contexts = _load(files)

    def for_coordinator(self) -> SSLContext:
        return self._contexts_now()[0]

    def for_node(self) -> SSLContext:
        return self._contexts_now()[1]

    def objection_to(self, certificate: Mapping[str, Any] | None) -> str | None:
        """Why a certificate from `SSLObject.getpeercert` does not identify the peer; None if it does."""
        if not self.files.peer:
            return None
        names = [str(name) for _, name in (certificate or {}).get("subjectAltName", ())]
        if self.files.peer in names:
            return None
        return f"its certificate names {', '.join(names) or 'nobody'}, not {self.files.peer} (tls_peer)"

    def _contexts_now(self) -> tuple[SSLContext, SSLContext]:
        seen = _state(self.files)
        if seen != self._files_state:
            self._files_state = seen
            try:
                self._contexts = _load(self.files)
            except UserError as error:
                log.warning("%s; connections keep using the previous certificates", error)
            else:
                log.info("the TLS files changed and were reloaded: %s", ", ".join(self.files[:3]))
        return self._contexts


def _state(files: TlsFiles) -> list[tuple[int, int, int] | None]:
    """A value that changes when a renewal replaces a file or writes to it."""
    state: list[tuple[int, int, int] | None] = []
    for path in files[:3]:
        try:
            status = os.stat(path)
        except OSError:
            state.append(None)
        else:
            state.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return state


def _load(files: TlsFiles) -> tuple[SSLContext, SSLContext]:
    import ssl

    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_into(context, files)
        context.check_hostname = protocol is ssl.PROTOCOL_TLS_CLIENT and not files.peer
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    contexts[0].num_tickets = 0  # never resume a TLS session; offering it costs a third of the handshake
    return contexts[0], contexts[1]


def _load_into(context: SSLContext, files: TlsFiles) -> None:
    for name, path in zip(("tls_cert", "tls_key", "tls_ca"), files[:3], strict=True):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            os.close(fd)
        except OSError as error:
            raise UserError(f"{name}={path!r} cannot be read: {error.strerror}") from None
        if not regular:  # OpenSSL would wait for a named pipe forever
            raise UserError(f"{name}={path!r} is not a regular file; set it to the path of a PEM file")
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise UserError(
            f"tls_cert={files.cert!r} and tls_key={files.key!r} are not PEM files of a certificate and its unencrypted "
            f"key: {_reason(error)}"
        ) from None
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        raise UserError(f"tls_ca={files.ca!r} contains no PEM certificates: {_reason(error)}") from None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


class TlsError(Exception):
    """The peer's TLS or certificate is invalid; the message says why."""


class TlsChannel:
    """The coordinator's end of one TLS connection, as bytes in and bytes out.

    It can therefore start after the first byte has shown the kind of connection, and use the current files.
    """

    def __init__(self, tls: ControlTls) -> None:
        import ssl

        self._ssl = ssl
        self._tls = tls
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = tls.for_coordinator().wrap_bio(self._received, self._to_send, server_side=True)
        self.is_open = False
        """Whether the handshake is complete."""
        self.objection: str | None = None
        """Why the other side is not the peer although its certificate is valid."""

    def receive(self, data: bytes) -> bytes:
        """Decrypt received bytes; data `to_send` may result. Call it on any thread, but one at a time: during the
        handshake each call takes about half a millisecond, in which other threads can run. Raises TlsError if the
        connection is unusable.
        """
        self._received.write(data)
        try:
            if not self.is_open:
                self._object.do_handshake()
                self.is_open = True
                self.objection = self._tls.objection_to(self._object.getpeercert())
            return b"".join(iter(self._read, b""))
        except self._ssl.SSLWantReadError:
            return b""
        except self._ssl.SSLError as error:
            raise TlsError(f"TLS failed: {_reason(error)}") from None

    def send(self, data: bytes) -> None:
        """Encrypt `data` for `to_send`; drop it if the handshake is not complete."""
        if self.is_open:
            self._object.write(data)

    def to_send(self) -> bytes:
        return self._to_send.read()

    def close_notify(self) -> None:
        if self.is_open:
            try:
                self._object.unwrap()
            except self._ssl.SSLError:  # OpenSSL expects the peer's close_notify, which we do not need
                return

    def _read(self) -> bytes:
        try:
            return self._object.read(65536)
        except self._ssl.SSLWantReadError:
            return b""
