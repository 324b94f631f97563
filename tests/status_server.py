"""A server that receives the status of a TrainJob by HTTPS, like Kubeflow Trainer's."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

from rallypoint.features.trainjob import CA_CERT, TOKEN, URL
from tests.waiting import until

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainjobs/train/status"


@dataclass
class StatusServer:
    """What it was sent, and what it answers.

    `token` is the file with the token of the pod; `environ` has the variables by which it is found.
    """

    environ: dict[str, str]
    token: Path
    answer: tuple[int, bytes] = (200, b"{}")
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Path, token and content of each."""
    hangs: threading.Event | None = None
    """If set, requests are answered when it is."""

    @property
    def statuses(self) -> list[dict[str, Any]]:
        """The content of each request."""
        return [content["trainerStatus"] for _, _, content in self.requests]

    def until_sent(self, number: int) -> None:
        """Wait until there were so many requests."""
        until(lambda: len(self.requests) >= number, lambda: f"{number} requests: {self.requests}")


@contextmanager
def status_server(folder: Path) -> Iterator[StatusServer]:
    """A server on the loopback, whose certificate and token are in the folder."""
    authority = trustme.CA()
    ca, token = folder / "ca.crt", folder / "token"
    authority.cert_pem.write_to_path(str(ca))
    token.write_text("one\n")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((self.path, self.headers["Authorization"], content))
            if server.hangs is not None:
                server.hangs.wait(60)
            status, text = server.answer
            self.send_response(status)
            self.send_header("Location", "https://127.0.0.1:1/")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    web.socket = context.wrap_socket(web.socket, server_side=True)
    environ = {URL: f"https://127.0.0.1:{web.server_port}{PATH}", CA_CERT: str(ca), TOKEN: str(token)}
    server = StatusServer(environ, token)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        if server.hangs is not None:
            server.hangs.set()
        web.shutdown()
        web.server_close()
        thread.join()
