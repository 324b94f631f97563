"""The file of `--event-log-handler=jsonl:PATH`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.observe.telemetry import json_lines
from rallypoint.observe.telemetry.agent_events import Event, EventSource, OperatorActed
from rallypoint.observe.telemetry.handlers import (
    get_logging_handler,
    log_handlers,
    record,
    record_agent_event,
    takes_agent_events,
)
from rallypoint.observe.telemetry.json_lines import JsonLinesHandler
from tests.waiting import at_once

Make = Callable[[str], JsonLinesHandler]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[JsonLinesHandler] = []

    def handler(destination: str) -> JsonLinesHandler:
        made.append(JsonLinesHandler(destination))
        return made[-1]

    yield handler
    for opened in made:
        opened.close()
        opened._thread.join(10)
        assert not opened._thread.is_alive()


def event(number: int) -> OperatorActed:
    return OperatorActed(
        time=time.time(), elapsed=float(number), job="j", host="h", pid=1, by="me@h", text=f"{number:06}" + "x" * 94
    )


def put(handler: JsonLinesHandler, *events: object) -> None:
    for entry in events:
        line = logging.LogRecord("events", logging.INFO, "", 0, "", (), None)
        line.rallypoint_event = entry
        handler.handle(line)
    handler.flush()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "new" / "events.jsonl"
    metadata: dict[str, str | int | float | bool | None] = {"run_id": "j", "hostname": "h", "total_run_time": 7}
    metadata["metadata"] = '{"entry_point": "x"}'
    of_torch = Event("torchelastic.worker.status.START", EventSource.WORKER, 5, metadata)
    put(make(f"jsonl:{path}".removeprefix("jsonl:")), event(1), of_torch, "something else")
    ours, torchs = lines(path)
    assert (ours["event"], ours["version"], ours["by"]) == ("operator", 1, "me@h")
    assert (torchs["event"], torchs["name"], torchs["job"]) == ("torch", "torchelastic.worker.status.START", "j")
    assert torchs["metadata"] == metadata | {"metadata": {"entry_point": "x"}}, "JSON in a string is unpacked"


def test_rotation(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_MEGABYTE", 1000)
    path = tmp_path / "e.jsonl"
    put(make(f"{path}?max_mb=1&keep=2"), *(event(number) for number in range(20)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["e.jsonl", "e.jsonl.1", "e.jsonl.2"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    found = [line["elapsed"] for name in ("e.jsonl.2", "e.jsonl.1", "e.jsonl") for line in lines(tmp_path / name)]
    assert found == [float(number) for number in range(20 - len(found), 20)], "the newest, in order"
    put(make(str(tmp_path)), event(1))
    (file,) = tmp_path.glob("events-*.jsonl")  # an agent's own file in a folder
    assert len(lines(file)) == 1


def test_rotation_of_a_shared_file(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_MEGABYTE", 1000)
    path = tmp_path / "e.jsonl"
    handlers = [make(f"{path}?max_mb=2&keep=200") for _ in range(4)]
    at_once(*(partial(put, handler, *map(event, range(100))) for handler in handlers))
    found = [line["elapsed"] for file in tmp_path.iterdir() for line in lines(file)]
    assert sorted(found) == sorted(float(number) for number in range(100) for _ in range(4))


def test_a_full_disk(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.jsonl"
    handler = make(str(path))
    write = os.write

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    put(handler, event(1), event(2))
    monkeypatch.setattr(os, "write", write)
    put(handler, event(3))
    lost, third = lines(path)
    assert (lost["event"], lost["count"], third["elapsed"]) == ("events_lost", 2, 3.0)


@pytest.mark.parametrize(
    ("destination", "sentence"),
    [
        ("", "jsonl: contains no path; use jsonl:PATH"),
        ("?keep=1", "contains no path"),
        ("e.jsonl?keep=-1", "does not describe a rotation"),
        ("e.jsonl?max_mb=0", "does not describe a rotation"),
        ("e.jsonl?max_mb=a", "does not describe a rotation"),
        ("e.jsonl?bytes=3", "does not describe a rotation"),
        ("/dev/null/e.jsonl", "events cannot be written to /dev/null/e.jsonl: Not a directory"),
    ],
)
def test_invalid_destinations(destination: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        JsonLinesHandler(destination)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_events_at_any_log_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    destination = f"jsonl:{tmp_path}/e.jsonl"
    handler = get_logging_handler(destination)
    assert takes_agent_events(destination)
    record_agent_event(event(1), destination)
    record(Event("torchelastic.worker.status.START", EventSource.WORKER), destination)
    handler.close()
    assert [line["event"] for line in lines(tmp_path / "e.jsonl")] == ["operator", "torch"]


def test_other_handlers_can_take_agent_events(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []

    class Mine(logging.Handler):
        takes_agent_events = True

        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    monkeypatch.setitem(log_handlers, "mine", Mine())
    assert [takes_agent_events(name) for name in ("null", "console", "mine")] == [False, False, True]
    record_agent_event(event(1), "mine")
    (found,) = records
    assert json.loads(found.getMessage())["by"] == "me@h"
    assert isinstance(found.__dict__["rallypoint_event"], OperatorActed)
