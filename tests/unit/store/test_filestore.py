"""The file store (contract section 9.7)."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.errors import StoreConnectionError, StoreProtocolError, StoreTimeoutError
from rallypoint.store.filestore import FileStore, removing, replay, setting
from tests.interrupts import interrupt_everywhere
from tests.processes import peak_below
from tests.waiting import in_thread

KEYS = st.sampled_from([b"/a", b"/b", b"refcount/", b"/", b"/-a"])
CHANGES = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.binary(max_size=20))), max_size=20)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@given(CHANGES)
def test_replay_gives_the_recorded_changes(changes: list[tuple[bytes, bytes | None]]) -> None:
    expected: dict[bytes, bytes] = {}
    data = b""
    for key, value in changes:
        if value is None:
            expected.pop(key, None)
            data += removing(key)
        else:
            expected[key] = value
            data += setting(key, value)
    content: dict[bytes, bytes] = {}
    replay(data, content)
    assert content == expected


@given(CHANGES, st.data())
def test_a_damaged_file_is_an_error(changes: list[tuple[bytes, bytes | None]], data: st.DataObject) -> None:
    whole = b"".join(setting(key, value or b"") for key, value in changes)
    cut = data.draw(st.integers(0, len(whole)))
    content: dict[bytes, bytes] = {}
    try:
        replay(whole[:cut] + data.draw(st.binary(max_size=3)), content)
    except StoreProtocolError:
        return
    assert set(content) <= {key for key, _ in changes} | {b""}


def test_file_format(path: str) -> None:
    store = FileStore(path)
    assert (store.list_keys(), store.num_keys(), store.path) == ([], 0, path), "bookkeeping is not shown"
    store.set("a", "1")
    store.delete_key("a")
    store.close()
    assert Path(path).read_bytes() == b"".join(
        [
            *(setting(b"refcount/", b"1"), setting(b"/a", b"1"), setting(b"-/a", b"")),
            *(setting(b"cleanup/", b"1"), setting(b"refcount/", b"0")),
        ]
    )
    assert setting(b"/a", b"1") == bytes.fromhex("02000000 2f61 01000000 31")


def test_the_last_process_removes_the_file(path: str) -> None:
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.close()
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)
    with FileStore(path):
        pass
    assert os.path.exists(path)
    first, second = FileStore(path, 1), FileStore(path, 1)
    first.close()
    assert os.path.exists(path), "one more than announced has it open"
    second.close()
    assert not os.path.exists(path)


def test_a_deleted_file_can_be_created_again(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "old")
        os.unlink(path)
        assert not store.check(["k"])
        with pytest.raises(StoreTimeoutError):
            store.wait(["k"], 0.03)
        assert not os.path.exists(path)
        got = in_thread(lambda: store.get("k"))
        with FileStore(path) as other:
            other.set("k", "new")
        assert got() == b"new"


@pytest.mark.parametrize("cut", [1, 4, 7, 4100])
def test_an_incomplete_record_is_ignored(path: str, cut: int) -> None:
    """A fatal signal can interrupt write(2) between two pages."""
    with FileStore(path) as killed, FileStore(path) as reader, FileStore(path) as writer:
        killed.set("a", "1")
        assert reader.get("a") == b"1"
        whole = os.path.getsize(path)
        killed.set("b", bytes(6000))
        os.truncate(path, whole + cut)
        assert reader.list_keys() == ["a"], "a reader changes nothing"
        assert os.path.getsize(path) == whole + cut
        with FileStore(path) as late:
            assert late.list_keys() == ["a"]
        writer.set("c", "3")
        assert reader.multi_get(["a", "c"]) == [b"1", b"3"]
        assert killed.list_keys() == ["a", "c"]


def test_an_incomplete_first_record_is_overwritten(path: str) -> None:
    for size in range(1, 22):
        Path(path).write_bytes(setting(b"refcount/", b"1")[:size])
        with FileStore(path) as store:
            store.set("a", "1")
            assert store.list_keys() == ["a"]


def test_large_files_are_compacted(path: str) -> None:
    with (
        FileStore(path, compact_above=10_000) as one,
        FileStore(path, compact_above=10_000) as two,
        FileStore(path) as reader,
    ):
        os.chmod(path, 0o640)
        one.set("gone", "x")
        one.delete_key("gone")
        for number in range(200):
            (one, two)[number % 2].set("state", b"%d" % number + bytes(500))
            assert reader.get("state").rstrip(b"\0") == b"%d" % number
        assert os.path.getsize(path) < 20_000
        assert os.stat(path).st_mode & 0o777 == 0o640
        assert (reader.list_keys(), os.listdir(os.path.dirname(path))) == (["state"], [os.path.basename(path)])
    assert FileStore(path).get("state").rstrip(b"\0") == b"199"


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreConnectionError, match="No such file or directory"):
        FileStore(str(tmp_path / "missing" / "store"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(StoreConnectionError, match="cannot be opened"):
            FileStore(str(path))


@pytest.mark.parametrize("beginning", [b"", b"\0\0\0\xff", b"\1\0\0\0/\xff\xff\xff\xff"])
def test_other_files_are_refused(path: str, beginning: bytes) -> None:
    with open(path, "wb") as file:
        file.write(beginning)
        file.truncate(3 << 30)
    with peak_below(16 << 20), pytest.raises(StoreProtocolError, match="not a FileStore file"):
        FileStore(path)
    for content in (b"#!/bin/sh\necho hello\n", setting(b"/k", b"v")[:-1]):
        Path(path).write_bytes(content)
        with pytest.raises(StoreProtocolError, match=r"cannot be read as a store .*; use another path"):
            FileStore(path)
        assert Path(path).read_bytes() == content


def test_records_can_be_longer_than_a_read(path: str) -> None:
    with FileStore(path) as first:
        first.set("large", b"x" * (5 << 20))
        first.set("small", b"y")
        with FileStore(path) as second:
            assert second.get("large") == b"x" * (5 << 20)
            assert second.get("small") == b"y"


def test_a_full_disk_leaves_complete_records(path: str) -> None:
    """RLIMIT_FSIZE stands for a full disk: a write stops in the middle of a record."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with FileStore(path) as store:
        store.set("a", "1")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 100, former[1]))
            with pytest.raises(StoreConnectionError, match="cannot be written"):
                store.set("b", bytes(1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
            signal.signal(signal.SIGXFSZ, handler)
        assert store.list_keys() == ["a"]
        store.set("b", "2")
        with store.clone() as other:
            assert other.multi_get(["a", "b"]) == [b"1", b"2"]


@pytest.mark.process
def test_processes_and_threads_share_a_file(path: str) -> None:
    code = (
        "import sys, threading; from rallypoint.store.filestore import FileStore; s = FileStore(sys.argv[1], 4);"
        "ts = [threading.Thread(target=lambda: [s.add('n', 1) for _ in range(50)]) for _ in range(4)];"
        "[t.start() for t in ts]; [t.join() for t in ts]; s.barrier('b', 4, 60); s.close()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(3)]
    store = FileStore(path, 4)
    store.barrier("b", 4, 60)
    assert store.get("n") == b"600"
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    store.close()
    assert not os.path.exists(path)


# A file interrupted between its creation and its first use is closed by the garbage collector, with a warning.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_signal_handler_can_close_the_store(path: str) -> None:
    FileStore(path).set("key", "value")
    stores = [FileStore(path)]
    for place, error in interrupt_everywhere(lambda: stores[-1].add("key2", 1)):
        closing = threading.Thread(target=stores[-1].close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive(), f"interrupted in {place}, an operation left the file locked: {error!r}"
        stores.append(FileStore(path))
    stores[-1].close()
