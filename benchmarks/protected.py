"""What protects a control plane that is measured, made by the product's own parts. Certificates need `trustme`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.messages import Protected
from rallypoint.base.secrets import Secret
from rallypoint.base.tls import ControlTls, TlsFiles

_FILES = ("cert.pem", "key.pem", "ca.pem")


def key_of(protected: Protected, job: str) -> bytes | None:
    """The job's key, or None without a secret."""
    return Secret((protected.secret,)).keys(job)[0] if protected.secret else None


def tls_of(protected: Protected) -> ControlTls | None:
    """Both sides' contexts, or None without certificates."""
    if not protected.certificates:
        return None
    return ControlTls(TlsFiles(*(f"{protected.certificates}/{name}" for name in _FILES)))


def conf_of(protected: Protected) -> str:
    """The same certificates as `--rdzv-conf`; empty without them."""
    if not protected.certificates:
        return ""
    named = zip(("tls_cert", "tls_key", "tls_ca"), _FILES, strict=True)
    return ",".join(f"{option}={protected.certificates}/{name}" for option, name in named)


def make_certificates(folder: Path) -> None:
    """Put a certificate of 127.0.0.1, its key and their authority into a folder."""
    import trustme

    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(folder / _FILES[0])
    made.private_key_pem.write_to_path(folder / _FILES[1])
    authority.cert_pem.write_to_path(folder / _FILES[2])
