"""The agent's end of the channel to workers that continue in their processes."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rallypoint.features.inprocess.channel import ReleasedWorkers, WorkerChannel

Listen = Callable[[int], int]


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Listen]:
    """Lets the worker of a local rank announce itself; returns the descriptor that it reads."""
    fds: list[int] = []

    def announce(rank: int) -> int:
        path = tmp_path / f"inprocess.{rank}"
        os.mkfifo(path, 0o600)
        fds.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        return fds[-1]

    yield announce
    for fd in fds:
        os.close(fd)


@pytest.fixture
def channel(tmp_path: Path) -> WorkerChannel:
    return WorkerChannel(str(tmp_path))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_announced_and_left_workers(channel: WorkerChannel, tmp_path: Path, listen: Listen) -> None:
    assert (channel.announced(), channel.left(0)) == (set(), set())
    listen(0)
    listen(12)
    others = "inprocess.x inprocess. inprocess.1.2 inprocess.² .inprocess.3.77 left.x.4 left.7.x left.8 ack.0.1"
    for name in ("left.0.4", "left.5.40", "progress.0", "notice.json", *others.split()):
        (tmp_path / name).touch()
    assert channel.announced() == {0, 12}
    assert (channel.left(4), channel.left(40), channel.left(5)) == ({0}, {5}, set())


@pytest.mark.parametrize("folder", ["", "/no/such/folder"])
def test_without_a_folder(folder: str) -> None:
    channel = WorkerChannel(folder)
    assert (channel.announced(), channel.left(0), channel.leave(0, 1)) == (set(), set(), False)
    assert not channel.enter(0, 1, {})
    channel.remove({0})


def test_messages_to_workers(channel: WorkerChannel, tmp_path: Path, listen: Listen) -> None:
    reads = listen(1)
    assert channel.leave(1, 3)
    assert channel.enter(1, 4, {"RANK": "0", "GONE": None})
    assert os.read(reads, 100) == b"leave 3\nenter 4\n"
    found = json.loads((tmp_path / "round.1.json").read_text())
    assert found == {"round": 4, "environment": {"RANK": "0", "GONE": None}}
    os.mkfifo(tmp_path / "inprocess.0")  # left by a dead worker
    (tmp_path / "inprocess.2").touch()
    (tmp_path / "inprocess.3").symlink_to("inprocess.1")
    full = listen(4)
    with suppress(BlockingIOError):
        while True:
            os.write(full, bytes(1 << 16))
    assert [channel.leave(rank, 0) for rank in range(6)] == [False, True, False, False, False, False]
    assert not channel.enter(0, 1, {})


def test_files_of_ranks_are_removed(channel: WorkerChannel, tmp_path: Path, listen: Listen) -> None:
    for rank in (1, 11):
        listen(rank)
        for name in (f"left.{rank}.0", f"left.{rank}.1", f"round.{rank}.json", f"progress.{rank}", f"ack.{rank}.2"):
            (tmp_path / name).touch()
    (tmp_path / "notice.json").touch()
    kept = {name for name in names(tmp_path) if "11" in name} | {"notice.json"}
    channel.remove({1, 2})
    assert names(tmp_path) == kept


def test_leaving_workers_wake_the_agent(channel: WorkerChannel, tmp_path: Path, listen: Listen) -> None:
    reads = listen(0)
    listen(1)
    (tmp_path / "left.1.6").touch()
    with closing(ReleasedWorkers(channel, [0, 1, 2], 7)) as leaving:
        assert leaving.told == {0, 1}
        assert os.read(reads, 100) == b"leave 7\n"
        leaving.left()
        assert select.select(leaving.fds(), [], [], 0)[0] == []
        (tmp_path / "left.0.7").touch()
        (tmp_path / "left.2.7").touch()  # it was not asked
        assert select.select(leaving.fds(), [], [], 10)[0] == leaving.fds()
        assert leaving.left() == {0}
        assert not leaving.must_be_polled
    leaving.close()


def test_without_inotify_workers_are_polled(
    channel: WorkerChannel, tmp_path: Path, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: object) -> None:
        raise OSError(24, "too many of these")

    monkeypatch.setattr("rallypoint.base.inotify.Inotify.__init__", refuse)
    listen(0)
    leaving = ReleasedWorkers(channel, [0], 7)
    assert (leaving.must_be_polled, leaving.fds(), leaving.left()) == (True, [], set())
    (tmp_path / "left.0.7").touch()
    assert leaving.left() == {0}
