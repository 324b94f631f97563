"""Exit codes with `--exit-codes`, and the verdict file."""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any

import pytest

from rallypoint.base.errors import (
    JobPreempted,
    NodeLeftInOrder,
    PreflightError,
    ResourceError,
    SignalException,
    UsageError,
    UserError,
)
from rallypoint.cli.verdict import (
    CODES,
    MAX_TERMINATION_LOG,
    TERMINATION_LOG,
    Classified,
    classified,
    finish,
    termination_message,
    verdict_of,
)
from rallypoint.control.etcd.api import EtcdRefused, EtcdUnreachable
from rallypoint.control.membership.state import Outcome, Verdict
from rallypoint.control.protocol.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    error_of,
)
from rallypoint.control.protocol.messages import JobEnded
from rallypoint.failures.cause import Cause, Ending
from rallypoint.failures.report import ChildFailedError

CAUSE = Cause(3, 1, "node7", 4711, -9, "it was killed", "Traceback\n" + "x" * 9000, 1e9, "/logs/error.json")


def failed(ending: Ending) -> ChildFailedError:
    return ChildFailedError("train.py", {}, CAUSE, ending=ending)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (NodeLeftInOrder("left", SIGTERM), 0),
        (ChildFailedError("train.py", {}, CAUSE), 1),
        (RuntimeError("a defect"), 1),
        (UserError("bad"), 2),
        (UsageError("bad"), 2),
        (EtcdRefused("password"), 2),
        (RendezvousClosedError("another job's"), 2),
        (EtcdUnreachable("away"), 75),
        (RendezvousTimeoutError("too few"), 75),
        (RendezvousConnectionError("lost"), 75),
        (ResourceError("no memory"), 75),
        (PreflightError("no shared memory"), 75),
        (failed(Ending.INFRASTRUCTURE), 75),
        (SignalException("got SIGTERM", SIGTERM), 75),
        (failed(Ending.REPEATED), 93),
        (failed(Ending.HANG), 124),
        (SignalException("got SIGTERM", SIGTERM, saved=True), 143),
        (RendezvousClosedError("stopped", ending=Ending.STOPPED), 94),
        (JobPreempted("n1 received SIGUSR2"), 143),
        (SignalException("got SIGINT", SIGINT), 130),
        (SignalException("got SIGHUP", SIGHUP), 129),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_classified_codes(error: BaseException | None, code: int) -> None:
    assert classified(error).code == code


@pytest.mark.parametrize(
    ("left", "is_pod", "code"),
    [
        (NodeLeftInOrder("evicted", SIGTERM), True, 75),
        (NodeLeftInOrder("evicted", SIGTERM, saved=True), True, 143),
        (NodeLeftInOrder("drained", SIGTERM, saved=True, drained=True), True, 0),
        (NodeLeftInOrder("asked to leave", SIGTERM, saved=True), False, 0),
    ],
)
def test_only_an_evicted_pod_is_replaced(left: NodeLeftInOrder, is_pod: bool, code: int) -> None:
    assert classified(left, is_pod=is_pod).code == code


@pytest.mark.parametrize("ending", Ending)
def test_late_nodes_end_like_the_job(ending: Ending) -> None:
    late = error_of(JobEnded(Verdict(Outcome.FAILED, CAUSE, ending=ending)))
    assert classified(late).code == CODES[ending]


def test_the_verdict_file(tmp_path: Path) -> None:
    shown = tmp_path / "termination-log"
    shown.touch()
    environ = {"RALLYPOINT_VERDICT_FILE": str(tmp_path / "v.json"), "RALLYPOINT_TERMINATION_LOG": str(shown)}
    assert finish(failed(Ending.REPEATED), 1, "job", "classified", environ) == 93
    verdict: dict[str, Any] = json.loads((tmp_path / "v.json").read_text())
    assert (verdict["version"], verdict["code"], verdict["ending"]) == (1, 93, "repeated")
    assert (verdict["cause"]["rank"], verdict["cause"]["host"], verdict["cause"]["signal"]) == (3, "node7", "SIGKILL")
    shortened: dict[str, Any] = json.loads(shown.read_text())
    assert (shortened["code"], shortened["cause"]["rank"], shortened["cause"]["host"]) == (93, 3, "node7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["termination-log", "v.json"]
    assert finish(None, 0, "job", "torchrun", environ) == 0
    assert json.loads((tmp_path / "v.json").read_text())["succeeded"] is True
    assert json.loads(shown.read_text()) == shortened, "a success is not written there"


def test_the_verdict_with_torchrun_s_codes(tmp_path: Path) -> None:
    missing = {"RALLYPOINT_VERDICT_FILE": str(tmp_path / "none" / "v.json")}
    assert finish(RendezvousTimeoutError("too few"), 1, "job", "classified", missing) == 75
    assert list(tmp_path.iterdir()) == []
    environ = {"RALLYPOINT_VERDICT_FILE": str(tmp_path / "v.json")}
    assert finish(RendezvousTimeoutError("too few"), 1, "job", "torchrun", environ) == 1
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert (verdict["code"], verdict["classified_code"], verdict["ending"]) == (1, 75, "infrastructure")


@pytest.mark.parametrize("text", ["x", "é" * 3, "\0\1\x7f", "\U0001f4a5"])
def test_the_termination_message_is_short(text: str) -> None:
    cause = CAUSE._replace(message=text * 9000, host=text * 250, error_file=text * 4000)
    error = ChildFailedError("train.py", {}, cause)
    line = termination_message(verdict_of(error, Classified(Ending.PROGRAM, 1), 1, text * 5000))
    assert len(line) <= MAX_TERMINATION_LOG
    assert json.loads(line)["cause"]["rank"] == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ChildFailedError("train.py", {}, CAUSE), 1),
        (UsageError("bad"), 2),
        (RendezvousTimeoutError("too few"), 85),
        (RendezvousConnectionError("lost"), 85),
        (EtcdUnreachable("away"), 85),
        (failed(Ending.INFRASTRUCTURE), 85),
        (failed(Ending.HANG), 124),
        (failed(Ending.REPEATED), 93),
        (PreflightError("its GPU is broken"), 75),
        (ResourceError("no process can be started"), 75),
        (SignalException("evicted", SIGTERM), 75),
        (SignalException("evicted", SIGTERM, saved=True), 143),
        (NodeLeftInOrder("evicted", SIGTERM), 75),
        (NodeLeftInOrder("drained", SIGTERM, drained=True), 0),
    ],
)
def test_codes_for_restarts_in_place(error: BaseException | None, code: int) -> None:
    environ = {"JOB_COMPLETION_INDEX": "0", TERMINATION_LOG: "/none"}
    assert finish(error, 1, "job", "in-place", environ) == code
