"""One file, shared by torch's FileStore and ours, both ways (contract section 9.7)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rallypoint.store.filestore import FileStore
from tests.conformance.store_pairs import TIMEOUT, torch_stores

pytestmark = pytest.mark.torch


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def both_ways(path: str) -> list[tuple[Any, Any]]:
    """A store of each kind on the same file: as (writer, reader), and the other way round."""
    theirs, ours = torch_stores().FileStore(path), FileStore(path, timeout=TIMEOUT)
    theirs.set_timeout(TIMEOUT)
    return [(theirs, ours), (ours, theirs)]


def test_what_one_does_the_other_sees(path: str) -> None:
    for turn, (writer, reader) in enumerate(both_ways(path)):
        writer.set(f"k{turn}", "v")
        assert reader.get(f"k{turn}") == b"v"
        assert (writer.add("n", 2), reader.add("n", 3)) == (5 * turn + 2, 5 * turn + 5)
        assert writer.compare_set(f"c{turn}", "", "first") == b"first"
        assert reader.compare_set(f"c{turn}", "first", "second") == b"second"
        assert writer.compare_set(f"c{turn}", "first", "third") == b"second"
        assert reader.compare_set("none", "x", "y") == b"x"
        writer.append(f"a{turn}", "1")
        reader.append(f"a{turn}", "2")
        assert writer.get(f"a{turn}") == b"12"
        writer.multi_set([f"m{turn}", f"o{turn}"], ["1", ""])
        assert [bytes(value) for value in reader.multi_get([f"m{turn}", f"o{turn}"])] == [b"1", b""]
        assert reader.check([f"k{turn}", "n"])
        assert writer.delete_key(f"k{turn}")
        assert not reader.check([f"k{turn}"])
        writer.set(f"k{turn}", "again")
        assert reader.get(f"k{turn}") == b"again"
        writer.set("large", bytes(1_000_000))
        assert reader.get("large") == bytes(1_000_000)


def test_deletes_from_both_sides_at_once(path: str) -> None:
    theirs, ours = both_ways(path)[0]
    threads = [threading.Thread(target=_churn, args=[store, str(who)]) for who, store in enumerate((theirs, ours))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT.total_seconds())
    assert theirs.add("n", 0) == ours.add("n", 0) == 200
    assert sorted(key for key in theirs.list_keys() if key.startswith("kept")) == ["kept0", "kept1"]
    assert sorted(ours.list_keys()) == ["kept0", "kept1", "n"]


def _churn(store: Any, who: str) -> None:
    for _ in range(100):
        store.set(f"gone{who}", "x")
        store.add("n", 1)
        store.delete_key(f"gone{who}")
    store.set(f"kept{who}", "x")


def test_one_waits_for_the_other(path: str) -> None:
    for turn, (writer, reader) in enumerate(both_ways(path)):
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(reader.get(f"late{turn}")))  # noqa: B023 - joined below
        thread.start()
        writer.set(f"late{turn}", "v")
        thread.join(TIMEOUT.total_seconds())
        assert got == [b"v"]
        thread = threading.Thread(target=reader.barrier, args=[f"b{turn}", 2, TIMEOUT])
        thread.start()
        writer.barrier(f"b{turn}", 2, TIMEOUT)
        thread.join(TIMEOUT.total_seconds())
        assert not thread.is_alive()


@pytest.mark.parametrize("last", ["ours", "theirs"])
def test_the_last_of_the_world_removes_the_file_whoever_it_is(path: str, last: str) -> None:
    theirs, ours = torch_stores().FileStore(path, 2), FileStore(path, 2)
    if last == "ours":
        del theirs
        assert os.path.exists(path)
        ours.close()
    else:
        ours.close()
        assert os.path.exists(path)
        del theirs
    assert not os.path.exists(path)


_READS_BESIDE = """
import sys, threading
import torch
from rallypoint.store.filestore import FileStore

stores, stop = [FileStore(sys.argv[1], -1) for _ in range(3)], threading.Event()
stores[0].set("k", "v" * 1000)

def reads(store):
    while not stop.is_set():
        store.get("k")

threads = [threading.Thread(target=reads, args=(store,), daemon=True) for store in stores[1:]]
for thread in threads:
    thread.start()
for _ in range(300):
    stores[0].to_torch()
stop.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.process
def test_torch_opens_the_file_while_threads_of_ours_read_it(path: str) -> None:
    """In a process of its own: torch waits for the lock of the file without letting go of the interpreter."""
    subprocess.run([sys.executable, "-c", _READS_BESIDE, path], check=True, timeout=60)
