"""Reading workers' output for operators: the last lines, and for followers the new ones, each line once."""

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
    """Workers of the global ranks from 4 on, each with a file for its standard output."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        self._folder = folder
        ranks = [SimpleNamespace(local_rank=local, global_rank=4 + local) for local in range(count)]
        workers: Any = SimpleNamespace(group=SimpleNamespace(workers=ranks), pcontext=None)
        self.workers = workers
        self.reader = OutputReader(workers)
        self.files: list[Path] = []
        self.restart(0)

    def restart(self, attempt: int) -> None:
        self.files = [self._folder / f"{attempt}-{each.local_rank}" for each in self.workers.group.workers]
        for each in self.files:
            each.touch()
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
    """Nothing new is an answer at once."""
    monkeypatch.setattr(worker_output, "_LONGEST_WAIT", 0.0)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Nothing at all would look like workers that write nothing."""
    node = Node(tmp_path, 3)
    node.files[0].write_text("here\n")
    for file in node.files[1:]:
        file.unlink()
    found = node.ask(cursor=7)
    assert [each.rank for each in found.pieces] == [4]
    assert found.notes == ("logs of ranks 5-6 cannot be read: No such file or directory",)
    assert node.ask(cursor=7) == NodeLogs(()), "it is said once"


def test_the_last_lines_of_each_worker_or_of_some(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    append(node.files[0], "a\nb\nc\nunfinished")
    append(node.files[1], "x\n")
    assert node.lines(2) == ["[rank4]: c", "[rank4]: unfinished", "[rank5]: x"]
    assert node.lines(2, ranks=(5,)) == ["[rank5]: x"]
    assert node.lines(0) == []


def test_who_follows_is_sent_each_line_once_and_whole(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "a\nb\nc\nunfin")
    assert node.lines(2, cursor=7) == ["[rank4]: b", "[rank4]: c"]
    assert node.lines(2, cursor=7) == []
    append(node.files[0], "ished\nd\n")
    assert node.lines(2, cursor=7) == ["[rank4]: unfinished", "[rank4]: d"]
    assert node.lines(1, cursor=8) == ["[rank4]: d"], "another follower"


def test_the_rest_of_a_start_comes_before_all_of_the_next(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "a\n")
    assert node.lines(1, cursor=7) == ["[rank4]: a"]
    append(node.files[0], "ValueError: boom")
    node.restart(1)
    append(node.files[0], "b\nc\n")
    assert node.lines(1, cursor=7) == ["[rank4]: ValueError: boom", "[rank4]: b", "[rank4]: c"]


def test_an_answer_has_what_there_is_room_for_and_the_next_ones_have_the_rest(tmp_path: Path) -> None:
    node = Node(tmp_path, 3)
    assert node.ask(1, cursor=7).pieces == ()
    written = {4 + local: "".join(f"{local} {number}\n" for number in range(5000)) for local in range(3)}
    for local, path in enumerate(node.files):
        append(path, written[4 + local])
    got = dict.fromkeys(written, "")
    while pieces := node.ask(1, cursor=7, most=8 * 1024).pieces:
        for rank, data in pieces:
            got[rank] += data.decode()
    assert got == written


def test_with_many_workers_all_have_their_turn(tmp_path: Path) -> None:
    node = Node(tmp_path, 40)
    node.ask(1, cursor=7)
    for path in node.files:
        append(path, "x" * 2000 + "\n")
    seen: set[int] = set()
    while pieces := node.ask(1, cursor=7, most=8 * 1024).pieces:
        seen |= {each.rank for each in pieces}
    assert seen == set(range(4, 44))


def test_a_file_that_was_cut_short_is_read_from_its_beginning(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "a long line\n")
    node.ask(cursor=7)
    node.files[0].write_text("b\n")
    assert node.lines(cursor=7) == ["[rank4]: b"]


def test_what_passes_through_the_agent_is_followed_and_what_does_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_output, "_console", lambda _end: None)
    node = Node(tmp_path)
    context = node.workers.pcontext = Context({}, {}, b"Traceback\nboom\n")
    first = node.ask(1, cursor=7)
    assert list(log_lines(first, "n", labelled=False)) == ["boom"]
    assert "--tee=3" in first.notes[0]
    context.passed += b"again\n"
    assert node.ask(1, cursor=7) == NodeLogs(((4, b"again\n"),))  # type: ignore[arg-type]


def test_whoever_follows_is_answered_when_the_agent_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_program_has_written_cannot_change_the_terminal(tmp_path: Path) -> None:
    node = Node(tmp_path)
    append(node.files[0], "\x1b[31mred\x1b[0m \x1b]0;title\x07\n 1%\r 50%\r100%\r\n\ttab\n")
    lines = [each.removeprefix("[rank4]: ") for each in node.lines()]
    assert lines == ["red ?]0;title?", "100%", "\ttab"]
