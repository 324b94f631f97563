"""Before the first connection: is what we need installed, and can the files for TLS be used?"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rallypoint.base.errors import UserError
from rallypoint.etcd.api import EtcdPackageMissing, EtcdTls

if TYPE_CHECKING:
    import ssl


def require_grpc() -> None:
    """Raise `EtcdPackageMissing` where the package that carries gRPC is not installed. Imports nothing."""
    if importlib.util.find_spec("grpclib") is None:
        raise EtcdPackageMissing(
            "etcd needs the package grpclib, which is not installed; run: pip install 'rallypoint[etcd]'"
        )


def load_tls(tls: EtcdTls | None) -> ssl.SSLContext | None:
    """The files as a context; None for plain connections.

    Raises:
        UserError: a file cannot be read, or holds something else.
    """
    if tls is None:
        return None
    import ssl

    if tls.key is not None and tls.cert is None:
        raise UserError(f"there is a key ({tls.key}) and no certificate for it; give `cert` too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        if tls.cacert is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cafile=tls.cacert)
    except OSError as error:  # ssl.SSLError is one
        raise UserError(
            f"`cacert` {tls.cacert} cannot be used ({_file_error(error)}); give a file of certificates in PEM"
        ) from error
    if tls.cert is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except OSError as error:
            files = tls.cert if tls.key is None else f"{tls.cert} with `key` {tls.key}"
            raise UserError(
                f"`cert` {files} cannot be used ({_file_error(error)}); give a certificate and its own key in PEM"
            ) from error
    return context


def _file_error(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).lower().replace("_", " ")
