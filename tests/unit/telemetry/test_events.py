"""Invalid events, and handlers by name; tests/conformance compares the contents with torch's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.observe.telemetry import handlers
from rallypoint.observe.telemetry.agent_events import Event, EventSource, NodeState, RdzvEvent
from rallypoint.observe.telemetry.handlers import (
    construct_and_record_rdzv_event,
    get_logging_handler,
    log_handlers,
    record,
)


class MemoryHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.msg == record.getMessage()
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the loggers as in a new process."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    handlers._loggers.clear()
    yield
    for name in handlers._loggers:
        logging.getLogger(f"torchelastic-events-{name}").handlers.clear()
    handlers._loggers.clear()


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", "{}", '{"name": "n", "source": "NOBODY"}', '{"name": "n", "source": "AGENT", "z": 1}', "[" * 9999],
)
def test_invalid_events(line: str) -> None:
    with pytest.raises(UserError, match=r"is not an event as JSON on one line"):
        Event.deserialize(line)
    with pytest.raises(UserError, match=r"is not a rendezvous event as JSON"):
        RdzvEvent.deserialize(line)


def test_a_program_s_own_handler() -> None:
    with pytest.raises(
        UserError, match=r"^no installed package provides the event handler 'mine'; use one of console, dyn"
    ):
        record(Event("n", EventSource.AGENT), "mine")
    log_handlers["mine"] = kept = MemoryHandler()
    record(Event("n", EventSource.AGENT), "mine")
    assert [Event.deserialize(line).name for line in kept.lines] == ["n"]


@pytest.fixture(name="package")
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with handlers."""
    (tmp_path / "theirs.py").write_text(
        "import logging\nclass Mine(logging.NullHandler): pass\n"
        "made = Mine()\nnumber = 5\ndef broken(): raise OSError('no')\n"
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    offers = ["a_class = theirs:Mine", "made = theirs:made", "number = theirs:number", "broken = theirs:broken"]
    (info / "entry_points.txt").write_text("\n".join([f"[{handlers.GROUP}]", *offers, "gone = theirs:gone"]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)


@pytest.mark.usefixtures("package")
def test_handlers_of_installed_packages() -> None:
    assert type(get_logging_handler("a_class")).__name__ == "Mine"
    assert get_logging_handler("a_class") is get_logging_handler("a_class")
    assert type(get_logging_handler("made")).__name__ == "Mine"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("number", r"'number' is a int; its entry point must name a logging.Handler"),
        ("broken", r"'broken' cannot be created \(OSError: no\)"),
        ("gone", r"'gone' cannot be created \(AttributeError"),
        ("zz", r"use one of a_class, broken, console, dynamic_rendezvous, gone, made, null, number$"),
    ],
)
def test_handlers_that_cannot_be_used(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        get_logging_handler(name)


def test_rendezvous_events_without_a_handler() -> None:
    construct_and_record_rdzv_event("id", "m", NodeState.INIT)
    assert not handlers._loggers
