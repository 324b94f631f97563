"""`deploy/cloud/notices.py` against metadata services that answer as the clouds' documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "deploy" / "cloud" / "notices.py"
pytestmark = pytest.mark.process

_AWS = "/latest/meta-data"
_GOOGLE = "/computeMetadata/v1/instance"
_AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
_SPOT = json.dumps({"action": "terminate", "time": "2026-11-28T20:00:00Z"})
_EVENTS = {"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt", "NotBefore": "soon"}]}

TOLD = [
    ("aws", {f"{_AWS}/spot/instance-action": _SPOT}, "spot instance: terminate at 2026-11-28T20:00:00Z"),
    (
        "aws",
        {f"{_AWS}/events/maintenance/scheduled": json.dumps([{"Code": "system-reboot", "NotBefore": "soon"}])},
        "maintenance: system-reboot at soon",
    ),
    ("google", {f"{_GOOGLE}/preempted": "TRUE"}, "preempted"),
    (
        "google",
        {f"{_GOOGLE}/preempted": "FALSE", f"{_GOOGLE}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"},
        "maintenance: TERMINATE_ON_HOST_MAINTENANCE",
    ),
    ("azure", {_AZURE: json.dumps(_EVENTS)}, "Preempt not before soon"),
]
_REQUIRED = {"aws": "X-aws-ec2-metadata-token", "google": "Metadata-Flavor", "azure": "Metadata"}
_QUIET = {
    f"{_GOOGLE}/preempted": "FALSE",
    f"{_GOOGLE}/maintenance-event": "NONE",
    _AZURE: json.dumps({"Events": [{"EventType": "Freeze"}]}),
}


class _Service(HTTPServer):
    """A metadata service: says nothing until `answers` is set."""

    def __init__(self, required: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.required = required
        self.answers: dict[str, str] = dict(_QUIET)
        self.asked = threading.Semaphore(0)


class _Handler(BaseHTTPRequestHandler):
    server: _Service

    def log_message(self, *_: object) -> None: ...

    def do_PUT(self) -> None:
        self._reply(200, "a token")

    def do_GET(self) -> None:
        text = self.server.answers.get(self.path)
        allowed = self.headers.get(self.server.required) is not None
        self._reply(401 if not allowed else 404 if text is None else 200, text or "")
        self.server.asked.release()

    def _reply(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def _service(cloud: str) -> Iterator[_Service]:
    with _Service(_REQUIRED[cloud]) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()


def _start(cloud: str, service: _Service, *command: str) -> subprocess.Popen[str]:
    url = f"http://127.0.0.1:{service.server_port}"
    flags = [cloud, "--every=0.01", f"--metadata={url}", "--", *command]
    return subprocess.Popen([sys.executable, str(PROGRAM), *flags], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("cloud", "answers", "why"), TOLD)
def test_the_command_runs_once_when_the_cloud_says_so(
    cloud: str, answers: dict[str, str], why: str, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('x'); raise SystemExit(7)"
    with _service(cloud) as service, _start(cloud, service, sys.executable, "-c", code) as program:
        for _ in range(6):
            assert service.asked.acquire(timeout=30), "it asks again and again"
        assert not ran.exists()
        service.answers = answers
        _, said = program.communicate(timeout=30)
    assert program.returncode == 7, said
    assert ran.read_text() == "x"
    assert f"notices: {why}; running " in said


def test_a_service_that_answers_something_else_is_said_once_and_asked_again(tmp_path: Path) -> None:
    with _service("azure") as service, _start("azure", service, "/bin/true") as program:
        service.answers = {_AZURE: "<html>"}
        for _ in range(5):
            assert service.asked.acquire(timeout=30)
        service.answers = {_AZURE: json.dumps(_EVENTS)}
        _, said = program.communicate(timeout=30)
    assert program.returncode == 0, said
    assert said.count("cannot be asked, and is asked again") == 1
