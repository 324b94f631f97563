from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme

from rallypoint.base.errors import UserError
from rallypoint.base.tls import ControlTls, TlsFiles


def written(folder: Path, authority: trustme.CA, *names: str) -> TlsFiles:
    certificate = authority.issue_cert(*names)
    files = TlsFiles(*(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    certificate.cert_chain_pems[0].write_to_path(files.cert)
    certificate.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


def shaken(node: ssl.SSLContext, coordinator: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a successful handshake. Raises SSLError if it fails."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = node.wrap_bio(down, up, server_hostname=host), coordinator.wrap_bio(up, down, server_side=True)
    todo = list(ends)
    for _ in range(10):
        for end in list(todo):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            todo.remove(end)
    assert not todo
    return ends


def test_both_sides_show_certificates(tmp_path: Path) -> None:
    tls = ControlTls(written(tmp_path, trustme.CA(), "node0"))
    node, coordinator = shaken(tls.for_node(), tls.for_coordinator(), "node0")
    assert node.getpeercert()
    assert coordinator.getpeercert()
    assert tls.objection_to(coordinator.getpeercert()) is None
    with pytest.raises(ssl.SSLError):
        shaken(tls.for_node(), tls.for_coordinator(), "node1")


def test_both_sides_refuse_another_authority(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    one, other = ControlTls(written(ours, trustme.CA(), "node0")), ControlTls(written(theirs, trustme.CA(), "node0"))
    for node, coordinator in ((one, other), (other, one)):
        with pytest.raises(ssl.SSLError):
            shaken(node.for_node(), coordinator.for_coordinator(), "node0")


def test_peer_names(tmp_path: Path) -> None:
    files = written(tmp_path, trustme.CA(), "node0")
    tls = ControlTls(files._replace(peer="node0"))
    node, _ = shaken(tls.for_node(), tls.for_coordinator(), "whatever.the.endpoint.is")
    assert tls.objection_to(node.getpeercert()) is None
    spiffe = {"subjectAltName": (("URI", "spiffe://lab/job7"),)}
    assert "node0" in str(tls.objection_to(spiffe))
    assert ControlTls(files._replace(peer="spiffe://lab/job7")).objection_to(spiffe) is None
    assert "nobody" in str(tls.objection_to(None))


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    tls = ControlTls(written(tmp_path, trustme.CA(), "node0"))
    before = tls.for_node()
    assert tls.for_node() is before
    written(tmp_path, trustme.CA(), "node1")
    assert tls.for_node() is not before
    shaken(tls.for_node(), tls.for_coordinator(), "node1")
    kept = tls.for_node()
    Path(tls.files.key).write_text("half a fi")
    assert tls.for_node() is kept


def test_invalid_files(tmp_path: Path) -> None:
    files = written(tmp_path, trustme.CA(), "node0")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wrong = {
        "not a regular file": files._replace(cert=str(pipe)),
        "tls_cert": files._replace(cert=str(nonsense)),
        "tls_key": files._replace(key=files.cert),
        "tls_ca": files._replace(ca=str(nonsense)),
        "missing": files._replace(ca=str(tmp_path / "missing")),
    }
    for word, invalid in wrong.items():
        with pytest.raises(UserError, match=word):
            ControlTls(invalid)
