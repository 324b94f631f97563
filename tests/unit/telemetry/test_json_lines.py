"""The file of `--event-log-handler=jsonl:PATH`: its contents, its rotation, and the cost of a full disk."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
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

Make = Callable[[str], JsonLinesHandler]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[JsonLinesHandler] = []

    def handler(destination: str) -> JsonLinesHandler:
        made.append(JsonLinesHandler(destination))
        return made[-1]

    yield handler
    for each in made:
        each.close()
        each._thread.join(10)
        assert not each._thread.is_alive()


def event(number: int) -> OperatorActed:
    return OperatorActed(
        time=time.time(), elapsed=float(number), job="j", host="h", pid=1, by="me@h", text=f"{number:06}" + "x" * 94
    )


def put(handler: JsonLinesHandler, *events: object) -> None:
    for each in events:
        line = logging.LogRecord("events", logging.INFO, "", 0, "", (), None)
        line.rallypoint_event = each
        handler.handle(line)
    handler.flush()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_event_is_one_line(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "new" / "events.jsonl"
    metadata: dict[str, str | int | float | bool | None] = {
        "run_id": "j",
        "hostname": "h",
        "total_run_time": 7,
        "metadata": '{"entry_point": "x"}',
    }
    of_torch = Event("torchelastic.worker.status.START", EventSource.WORKER, 5, metadata)
    put(make(f"jsonl:{path}".removeprefix("jsonl:")), event(1), of_torch, "something else")
    ours, torchs = lines(path)
    assert (ours["event"], ours["version"], ours["by"]) == ("operator", 1, "me@h")
    assert (torchs["event"], torchs["name"], torchs["job"]) == ("torch", "torchelastic.worker.status.START", "j")
    assert torchs["metadata"] == metadata | {"metadata": {"entry_point": "x"}}, "what is JSON in a string is unpacked"


def test_in_a_folder_each_agent_has_a_file_of_its_own(tmp_path: Path, make: Make) -> None:
    put(make(str(tmp_path)), event(1))
    (file,) = tmp_path.glob("events-*.jsonl")
    assert len(lines(file)) == 1


def test_it_is_rotated_by_size_and_only_so_many_files_stay(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_MEGABYTE", 1000)
    path = tmp_path / "e.jsonl"
    put(make(f"{path}?max_mb=1&keep=2"), *(event(number) for number in range(20)))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["e.jsonl", "e.jsonl.1", "e.jsonl.2"]
    assert all(each.stat().st_size <= 1000 for each in tmp_path.iterdir())
    found = [each["elapsed"] for name in ("e.jsonl.2", "e.jsonl.1", "e.jsonl") for each in lines(tmp_path / name)]
    assert found == [float(number) for number in range(20 - len(found), 20)], "the newest, in order"


def test_agents_that_share_a_file_lose_no_line_where_it_is_rotated(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_MEGABYTE", 1000)
    path = tmp_path / "e.jsonl"
    handlers = [make(f"{path}?max_mb=2&keep=200") for _ in range(4)]
    writers = [threading.Thread(target=put, args=(each, *(event(n) for n in range(100)))) for each in handlers]
    for each in writers:
        each.start()
    for each in writers:
        each.join(30)
    found = [each["elapsed"] for file in tmp_path.iterdir() for each in lines(file)]
    assert sorted(found) == sorted(float(number) for number in range(100) for _ in range(4))


def test_a_full_disk_costs_lines_and_the_file_says_so(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_what_cannot_be_a_file_is_refused_in_a_sentence(destination: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        JsonLinesHandler(destination)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


# By name


def agent_event_of(destination: str) -> None:
    record_agent_event(event(1), destination)


def test_by_name_it_is_given_all_events_whatever_the_log_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    destination = f"jsonl:{tmp_path}/e.jsonl"
    handler = get_logging_handler(destination)
    assert takes_agent_events(destination)
    agent_event_of(destination)
    record(Event("torchelastic.worker.status.START", EventSource.WORKER), destination)
    handler.close()
    assert [each["event"] for each in lines(tmp_path / "e.jsonl")] == ["operator", "torch"]


def test_a_handler_of_somebody_else_is_given_them_if_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []

    class Mine(logging.Handler):
        takes_agent_events = True

        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    monkeypatch.setitem(log_handlers, "mine", Mine())
    assert [takes_agent_events(name) for name in ("null", "console", "mine")] == [False, False, True]
    agent_event_of("mine")
    (found,) = records
    assert json.loads(found.getMessage())["by"] == "me@h"
    assert isinstance(found.__dict__["rallypoint_event"], OperatorActed)
