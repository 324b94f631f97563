"""Reading workers' output for operators: the last lines, and each new line once for followers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.control.protocol.messages import CollectKind, CollectRequested
from rallypoint.features.reports import worker_output
from rallypoint.features.reports.worker_output import OutputReader
from rallypoint.observe.worker_logs import NodeLogs, decode_logs, log_lines

ROOM = 64 * 1024


@dataclass(eq=False)
class Context:
    stdouts: Mapping[int, str]
    stderrs: Mapping[int, str] = field(default_factory=dict)
    passed: bytes = b""

    def relay(self, _local_rank: int, stream: int) -> Context | None:
        return self if stream == 1 else None

    def since(self, at: int) -> tuple[int, bytes]:
        return at, self.passed[at:]


class Node:
    """Workers with global ranks from 4, each with a file for its standard output."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        self._folder = folder
        ranks = [SimpleNamespace(local_rank=local, global_rank=4 + local) for local in range(count)]
        workers: Any = SimpleNamespace(group=SimpleNamespace(workers=ranks), pcontext=None)
        self.workers = workers
        self.reader = OutputReader(workers)
        self.files: list[Path] = []
        self.restart(0)

    def restart(self, attempt: int) -> None:
        self.files = [self._folder / f"{attempt}-{worker.local_rank}" for worker in self.workers.group.workers]
        for file in self.files:
            file.touch()
        nowhere = dict.fromkeys(range(len(self.files)), "/dev/null")
        self.workers.pcontext = Context({local: str(path) for local, path in enumerate(self.files)}, nowhere)

    def ask(self, lines: int = 20, cursor: int = 0, ranks: tuple[int, ...] = (), most: int = ROOM) -> NodeLogs:
        asked = CollectRequested(1, CollectKind.LOGS, ranks, lines, cursor, most)
        data = self.reader.begin(asked)()
        assert len(data) <= most
        return decode_logs(data)

    def lines(self, *args: Any, **more: Any) -> list[str]:
        return list(log_lines(self.ask(*args, **more), "n", labelled=True))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers do not wait for new lines."""
    monkeypatch.setattr(worker_output, "_LONGEST_WAIT", 0.0)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_unreadable_logs_are_named(tmp_path: Path) -> None:
    """Without a note, they would look like workers that write nothing."""
    node = Node(tmp_path, 3)
    node.files[0].write_text("here\n")
    for file in node.files[1:]:
        file.unlink()
    found = node.ask(cursor=7)
    assert [piece.rank for piece in found.pieces] == [4]
    assert found.notes == ("logs of ranks 5-6 cannot be read: No such file or directory",)
    assert node.ask(cursor=7) == NodeLogs(()), "there is one note"


def test_last_lines_of_workers(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    append(node.files[0], "a\nb\nc\nunfinished")
    append(node.files[1], "x\n")
    assert node.lines(2) == ["[rank4]: c", "[rank4]: unfinished", "[rank5]: x"]
    assert node.lines(2, ranks=(5,)) == ["[rank5]: x"]
    assert node.lines(0) == []


def test_followers_get_each_line_once_and_whole(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "a\nb\nc\nunfin")
    assert node.lines(2, cursor=7) == ["[rank4]: b", "[rank4]: c"]
    assert node.lines(2, cursor=7) == []
    append(node.files[0], "ished\nd\n")
    assert node.lines(2, cursor=7) == ["[rank4]: unfinished", "[rank4]: d"]
    assert node.lines(1, cursor=8) == ["[rank4]: d"], "another follower"
    node.files[0].write_text("b\n")
    assert node.lines(cursor=7) == ["[rank4]: b"], "a truncated file is read from its beginning"


def test_the_rest_of_an_attempt_comes_before_the_next(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "a\n")
    assert node.lines(1, cursor=7) == ["[rank4]: a"]
    append(node.files[0], "ValueError: boom")
    node.restart(1)
    append(node.files[0], "b\nc\n")
    assert node.lines(1, cursor=7) == ["[rank4]: ValueError: boom", "[rank4]: b", "[rank4]: c"]


@pytest.mark.parametrize(("workers", "lines", "width"), [(3, 5000, 0), (40, 1, 2000)])
def test_answers_are_bounded_and_the_rest_follows(tmp_path: Path, workers: int, lines: int, width: int) -> None:
    node = Node(tmp_path, workers)
    assert node.ask(1, cursor=7).pieces == ()
    written = {}
    for local, path in enumerate(node.files):
        written[4 + local] = "".join(f"{local} {number} {'x' * width}\n" for number in range(lines))
        append(path, written[4 + local])
    got = dict.fromkeys(written, "")
    while pieces := node.ask(1, cursor=7, most=8 * 1024).pieces:
        for rank, data in pieces:
            got[rank] += data.decode()
    assert got == written


def test_output_that_passes_through_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_output, "_console", lambda _end: None)
    node = Node(tmp_path)
    context = node.workers.pcontext = Context({}, {}, b"Traceback\nboom\n")
    first = node.ask(1, cursor=7)
    assert list(log_lines(first, "n", labelled=False)) == ["boom"]
    assert "--tee=3" in first.notes[0]
    context.passed += b"again\n"
    assert node.ask(1, cursor=7) == NodeLogs(((4, b"again\n"),))  # type: ignore[arg-type]


def test_followers_get_an_answer_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_output, "_LONGEST_WAIT", 3600.0)
    node = Node(tmp_path)
    answers: list[bytes] = []
    asked = CollectRequested(1, CollectKind.LOGS, (), 5, 7, ROOM)
    read = node.reader.begin(asked)
    thread = threading.Thread(target=lambda: answers.append(read()))
    node.reader.watch(thread)
    append(node.files[0], "last words without an end")
    thread.start()
    node.reader.close()
    thread.join()
    assert list(log_lines(decode_logs(answers[0]), "n", labelled=False)) == ["last words without an end"]


def test_output_cannot_change_the_terminal(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "\x1b[31mred\x1b[0m \x1b]0;title\x07\n 1%\r 50%\r100%\r\n\ttab\n")
    lines = [line.removeprefix("[rank4]: ") for line in node.lines()]
    assert lines == ["red ?]0;title?", "100%", "\ttab"]
