"""Converts a backend's parameters to the settings of an etcd client: endpoints, certificates, a user."""

from __future__ import annotations

from rallypoint.base.endpoint import Endpoint, parse_endpoint
from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.log import get_logger
from rallypoint.base.secrets import ETCD_PASSWORD, etcd_password
from rallypoint.control.etcd.api import Credentials, EtcdTls
from rallypoint.rendezvous.params import RendezvousParameters

DEFAULT_PORT = 2379
_DEFAULT_PREFIX = "/rallypoint"

log = get_logger(__name__)


def endpoints_of(text: str) -> list[Endpoint]:
    """One or several endpoints, separated by commas; each may begin with a scheme.

    Raises:
        UserError: one of them cannot be an endpoint.
    """
    parts = [part.strip() for part in text.split(",")]
    bare = [part.removeprefix("http://").removeprefix("https://") for part in parts]
    return list(dict.fromkeys(parse_endpoint(part, DEFAULT_PORT) for part in bare))


def tls_of(params: RendezvousParameters) -> EtcdTls | None:
    """The certificates, by the names of either of torch's etcd backends; None for plain connections.

    Raises:
        UserError: they do not go together.
    """
    cacert = _file(params, "cacert", "ca_cert")
    cert = _file(params, "cert", "ssl_cert")
    key = _file(params, "key", "ssl_cert_key")
    given = cacert is not None or cert is not None or key is not None
    protocol = str(params.get("protocol", "https" if given else "http")).strip().lower()
    if protocol not in ("http", "https"):
        raise UserError(f"rendezvous option protocol={protocol!r} is unknown; choose http or https")
    if protocol == "http":
        if given:
            raise UsageError(
                "rendezvous option protocol=http uses no certificates; give protocol=https or leave them out"
            )
        return None
    if key is not None and cert is None:
        raise UsageError(f"rendezvous option key={key!r} is the key of no certificate; give cert too")
    return EtcdTls(cacert, cert, key)


def prefix_of(params: RendezvousParameters) -> str:
    """What the keys of all jobs begin with, by our name for it or torch's."""
    return str(params.get("prefix", params.get("etcd_prefix", _DEFAULT_PREFIX)))


def credentials_of(params: RendezvousParameters) -> Credentials | None:
    """User and password; None if no user is given. The password may be in `RALLYPOINT_ETCD_PASSWORD` or in a file,
    where other users of the machine cannot read it.

    Raises:
        UserError: there is a password without a user, one of them is not text, or the file cannot be used.
    """
    user, password = params.get("user"), params.get("password")
    if user is None:
        if password is not None:
            raise UsageError("rendezvous option password is given without a user; give user too")
        return None
    if password is not None:
        log.warning(
            "rendezvous option password=... can be read in the list of processes by all users of this machine; "
            "put the password into a file, and its path into %s_FILE",
            ETCD_PASSWORD,
        )
    found = Credentials(str(user), etcd_password() if password is None else str(password))
    try:
        "".join(found).encode()
    except UnicodeEncodeError:
        raise UsageError("rendezvous options user and password must be text in UTF-8, and one of them is not") from None
    return found


def _file(params: RendezvousParameters, *names: str) -> str | None:
    found = (params.get(name) for name in names)
    return next((str(each) for each in found if each is not None), None)
