"""Targets on one host: files and requests of workers, probes, and settings that people write."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from rallypoint import metrics, notices
from rallypoint.agent import signals
from rallypoint.agent.folder import WorkerFolder, _integer
from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.secrets import ETCD_PASSWORD, SECRET, etcd_password, job_secret
from rallypoint.cli.convert import config_from_options
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import parse
from rallypoint.clusters import grace
from rallypoint.clusters.preflight.mesh import (
    Finding,
    MeshNode,
    decode_finding,
    decode_lines,
    encode_finding,
    encode_lines,
    greeting,
    mesh_lines,
    why_another,
)
from rallypoint.control.membership.state import Fail
from rallypoint.control.protocol import codec
from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import ProcessFailure, error_data
from rallypoint.failures.report import ChildFailedError
from rallypoint.failures.tracebacks import clean_lines, last_lines, last_stacks, last_traceback
from rallypoint.features import trainjob
from rallypoint.features.round_setup import PeerRecord, decode_record, encode_record
from rallypoint.observe.goodput import agent_runs, report
from rallypoint.observe.health import HealthView
from rallypoint.observe.report import EventFiles, read_events, report_json, report_lines
from rallypoint.observe.telemetry.agent_events import Event, RdzvEvent
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters, parse_rdzv_conf
from rallypoint.workers.logs.ends import joined, shortened
from rallypoint.workers.timers import FileTimerRequest, RequestReader
from rallypoint.workers.watchdog import UNINTERRUPTIBLE_VARIABLE, uninterruptible_timeout
from tests.fuzz.target import Target, no_errors
from tests.unit.health.test_http import reply

# What a worker leaves


def failures(data: bytes) -> None:
    """Error file and standard error of a worker that has failed: a report, an event, a message to the others."""
    exitcode, cut = (data[0] % 100 - 20, data[1]) if len(data) > 1 else (1, 0)
    half = 2 + (len(data) - 2) * cut // 255
    with TemporaryDirectory() as folder:
        path = Path(folder) / "error.json"
        path.write_bytes(data[2:half] if cut != 255 else data[2:])
        failure = ProcessFailure(0, 7, exitcode, str(path), last_lines=data[half:])
    json.dumps(failure.error_file_data)
    cause = Cause.from_failure(failure, 3, "host")
    codec.decode_request(codec.encode(Fail(0, cause, 3)))
    report = str(ChildFailedError("train.py", {3: failure}, cause)) + str(ChildFailedError("train.py", {3: failure}))
    report.encode(errors="backslashreplace")
    assert len(report) < 200_000
    assert "\n" not in cause.headline


def words(data: bytes) -> None:
    """The end of a worker's standard error, in which tracebacks and stacks are looked for."""
    lines = clean_lines(joined(*shortened(data)))
    assert not any("\r" in line or "\n" in line for line in lines)
    for read in (last_traceback, last_stacks, last_lines):
        read(lines)


_TRACEBACK = b'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: no\n'
_FATAL = b"Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n" + b"  File x\n" * 40


def _failure_seeds() -> Sequence[bytes]:
    files = [json.dumps(error_data("ValueError: no", _TRACEBACK.decode(), 1.7e9)).encode()]
    files += [b'{"message": "no"}', b'{"message": {"message": {"a": [1]}, "extraInfo": {"timestamp": 1.5}}}']
    made = [bytes([21, 255]) + file for file in files]
    return [*made, b"\x15\0" + _TRACEBACK, b"\x09\0" + _FATAL, b"\x15\x80" + files[0] + _TRACEBACK]


# What a worker is told and asks


def notes(data: bytes) -> None:
    """A notice that is no notice of ours, and acknowledgements of any name."""
    directory = WorkerFolder(lambda: [0], lambda request: None)
    folder = directory.reset()
    directory.post(notices.SCALE, "", 0, 60.0, waits=True)
    try:
        with patch.dict(os.environ, {notices.VARIABLE: folder, "LOCAL_RANK": "7"}):
            Path(folder, notices.NOTICE_FILE).write_bytes(data)
            notice = notices.pending()
            if notice is not None:
                notice.remaining()
                notices.acknowledge()
        name = data[:100].replace(b"/", b"_").replace(b"\0", b"_")
        with suppress(OSError):
            Path(folder, notices.ACK_PREFIX + os.fsdecode(name)).touch()
        answered = list(directory.step())
        rank, _, number = os.fsdecode(name).partition(".")
        assert not answered or (int(rank), int(number)) == (0, 1), "only this is the worker's answer"
    finally:
        directory.clear()
    assert not os.path.exists(folder)


def timers(data: bytes) -> None:
    """The watchdog's pipe: in any pieces the same requests."""
    step = data[0] + 1 if data else 1
    requests = RequestReader()
    for at in range(0, len(data), step):
        found, complaints = requests.feed(data[at : at + step])
        assert all(len(each) < 1000 for each in complaints)
        for request in found:
            assert math.isfinite(request.expiration_time)
            json.dumps(request.to_json())


def _timer_seeds() -> Sequence[bytes]:
    made = [
        FileTimerRequest(7, "scope", 1e9 + 5, 9).to_json().encode(),
        FileTimerRequest(7, "scope", -1.0).to_json().encode(),
    ]
    return [b"\x20" + b"\n".join([*made, b""]), b"\xff" + made[0][:30] + made[0] + b"\n"]


def probes(data: bytes) -> None:
    """The head of a request to the health server: an answer or a refusal."""
    for health in (HealthView(1.0, 5.0, {"round": 1}), HealthView(9.0, 5.0, {}, "no")):
        sent = reply(data, partial(lambda view: view, health))
        assert sent.startswith(b"HTTP/1.1 ")
        assert b"\r\n\r\n" in sent


def events(data: bytes) -> None:
    """A line that is said to be an event."""
    text = data.decode("utf-8", "surrogateescape")
    for kind in (Event, RdzvEvent):
        with suppress(UserError):
            kind.deserialize(text).serialize()


def _event_seeds() -> Sequence[bytes]:
    from rallypoint.observe.telemetry.agent_events import EventSource, NodeState

    event = Event("name", EventSource.AGENT, 1, {"a": 1})
    rdzv = RdzvEvent("name", "job", "message", "host", 7, NodeState.RUNNING)
    return [event.serialize().encode(), rdzv.serialize().encode()]


_NOTICE = b'{"reason": "scale", "node": "n", "round": 1, "deadline": 12.5, "number": 3}'


# What people write


_ENVIRONMENT: tuple[Callable[[str], object], ...] = (
    lambda text: signals.stated_grace_period({signals.VARIABLE: text}),
    lambda text: grace.kill_wait(text.split("\n")),
    lambda text: uninterruptible_timeout({UNINTERRUPTIBLE_VARIABLE: text}),
    lambda text: parse_endpoint(text, 29400),
    lambda text: parse_endpoint(text, None),
    lambda text: settings_of(RendezvousParameters("c10d", "h", "job", 1, 2, **parse_rdzv_conf(text))),
    lambda text: _with(SECRET, text, job_secret),
    lambda text: _with(f"{SECRET}_FILE", text, job_secret),
    lambda text: _with(ETCD_PASSWORD, text, etcd_password),
)


def _with(variable: str, text: str, read: Callable[[], object]) -> object:
    with patch.dict(os.environ, {variable: text}), patch.dict("rallypoint.base.secrets._taken", clear=True):
        return read()


def settings(data: bytes) -> None:
    """One value of a variable, an option or a flag: what it says, or one sentence."""
    which, text = (data[0], os.fsdecode(data[1:])) if data else (0, "")
    if "\0" in text:  # which neither a variable nor an argument can have
        return
    with no_errors():
        for read in _ENVIRONMENT:
            with suppress(UserError):
                read(text)
        _on_the_command_line(which, text)


def _on_the_command_line(which: int, text: str) -> None:
    flag = FLAGS[which % len(FLAGS)]
    commands: list[tuple[list[str], dict[str, str]]] = [
        ([f"{flag.name}={text}", "s.py"], {}),
        (["s.py"], {flag.variable: text}),
    ]
    for arguments, environ in commands:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            code: object = 0
            try:
                config_from_options(parse(arguments, environ), {})
            except SystemExit as left:
                code = left.code
            except UserError:
                continue
        assert code in (0, 2)


def _setting_seeds() -> Sequence[bytes]:
    texts = (
        *(
            b"30",
            b"1:4",
            b"host:29400",
            b"[::1]:29400",
            b"lease=3,join_timeout=60,min_healthy_time=1",
            b"0:1,1:2",
            b"auto",
        ),
        *(
            b"SIGTERM,SIGINT",
            b"rpt1-" + b"A" * 43,
            b"0123456789abcdefghij" * 2,
            b"KillWait=30",
            b"json",
            b"--",
            b"a,,b,c",
        ),
    )
    pairs = zip(range(max(len(FLAGS), len(texts))), cycle(texts))
    return [bytes([number]) + text for number, text in pairs]


def progress(data: bytes) -> None:
    """Steps that a worker and a file tell: none, or one that may be sent to the coordinator."""
    with TemporaryDirectory() as folder:
        Path(folder, f"{notices.PROGRESS_PREFIX}0").write_bytes(data)
        sent: list[bytes] = []
        tracker = WorkerFolder(lambda: (), lambda request: sent.append(codec.encode(request)))
        tracker._folder = folder
        tracker.begin_round(0, 1, -1)
        tracker.end_round()
        for each in sent:
            codec.decode_request(each)
        assert _integer(f"{folder}/{notices.PROGRESS_PREFIX}0") >= -1


def peer_records(data: bytes) -> None:
    """A record of another node: one that can be written again, or a sentence."""
    with suppress(ValueError):
        found = decode_record(data, 1, 64)
        assert decode_record(encode_record(found), 1, 64) == found
        assert found.node.isprintable()


def mesh(data: bytes) -> None:
    """What another node has found of the mesh, what group rank 0 makes of that, and what greets a dialler."""
    with suppress(ValueError):
        found = decode_finding(data, 1, 4)
        assert decode_finding(encode_finding(found), 1, 4) == found
        assert all(line.text.isprintable() for line in mesh_lines({1: found}, 4))
    with suppress(ValueError):
        _, lines = decode_lines(data, 4)
        assert decode_lines(encode_lines(lines), 4) == (len(lines), lines)
    assert why_another(_MESH_NODE, data).isprintable()


def event_files(data: bytes) -> None:
    """A file of events: what can be read makes a report, in which all adds up, and nothing else does harm."""
    with TemporaryDirectory() as folder:
        Path(folder, "e.jsonl").write_bytes(data)
        found = EventFiles()
        with suppress(UserError):
            found = read_events([folder])
    for lines in found.events.values():
        made = report(agent_runs(lines), found.notes)
        assert abs(sum(made.phases.values()) - made.wall) < 1e-3
        assert abs(made.productive + sum(made.lost.values()) - made.wall) < 1e-3
        text = "\n".join([*report_lines(made), report_json(made)])
        text.encode()
        assert "\x1b" not in text


def _event_file_seeds() -> Sequence[bytes]:
    recording = Path(__file__).parents[1] / "unit" / "observe" / "recording"
    lines = (recording / "n1.jsonl").read_bytes().splitlines(keepends=True)
    return [b"".join(lines[:12]), b"".join(lines[10:24]), b"".join(lines[-12:])]


_PEER = PeerRecord(1, "n1", "10.0.0.1", 8, 8, {"jax": (40000,)})

_MESH_NODE = MeshNode("job/coordinator/0", 1, "n1")
_FINDINGS = {0: Finding("n0", "10.0.0.1:4000", {1: "no route to host"}), 1: Finding("n1", "[::1]:4000")}


def worker_metrics(data: bytes) -> None:
    """What a worker leaves as metrics, and what a server answers to the report of them."""
    with suppress(ValueError, RecursionError):
        found = metrics.decoded(data)
        if found is not None:
            assert 0 <= found.total < 2**63
            position = trainjob.Position(7, 20.0, 3, 10.0)
            json.dumps(trainjob.status_of(position, found, "2026-11-28T22:00:00Z"), allow_nan=False)
    assert isinstance(trainjob._message(data), str)


TARGETS = {
    "worker-metrics": Target(
        worker_metrics,
        lambda: [b'{"total": 1000, "metrics": {"loss": 0.25, "lr": 1e-4}}', b'{"kind": "Status", "message": "no"}'],
        ("metrics.py", "features/trainjob.py"),
    ),
    "mesh": Target(
        mesh,
        lambda: [
            encode_finding(_FINDINGS[0]),
            encode_finding(_FINDINGS[1]._replace(failures={0: "connection timed out", 3: "connection refused"})),
            encode_lines(mesh_lines(_FINDINGS, 4)),
            greeting(_MESH_NODE),
        ],
        ("clusters/preflight/mesh.py",),
    ),
    "peer-records": Target(
        peer_records,
        lambda: [encode_record(_PEER), encode_record(_PEER._replace(address="2001:db8::1", ports={}))],
        ("features/round_setup.py",),
    ),
    "progress": Target(
        progress,
        lambda: [b"1200\n", bytes(32), (7).to_bytes(8, "little") * 4, (7).to_bytes(8, "little") * 2],
        ("agent/folder.py",),
        300,
    ),
    "event-files": Target(event_files, _event_file_seeds, ("observe/report.py",), 400),
    "failures": Target(failures, _failure_seeds, ("failures/failure.py", "failures/cause.py"), 300),
    "last-words": Target(
        words,
        lambda: [_TRACEBACK, _FATAL, b"a\rb\x1b[31mc\n" * 9],
        ("failures/tracebacks.py", "workers/logs/ends.py"),
    ),
    "notices": Target(notes, lambda: [_NOTICE, b"0.1", b"0.3", b"1.2"], ("notices.py", "agent/folder.py"), 300),
    "timers": Target(timers, _timer_seeds, ("workers/timers.py",)),
    "probes": Target(
        probes,
        lambda: [b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD /status?x HTTP/1.0\r\n\r\n"],
        ("base/http.py", "observe/health.py"),
    ),
    "events": Target(events, _event_seeds, ("observe/telemetry/agent_events.py",)),
    "settings": Target(
        settings,
        _setting_seeds,
        (
            *(
                "agent/signals.py",
                "clusters/grace.py",
                "base/endpoint.py",
                "base/secrets.py",
                "cli/parse.py",
                "cli/flags.py",
            ),
            *("rendezvous/params.py", "rendezvous/backends/options.py", "workers/watchdog.py"),
        ),
        150,
    ),
}
