"""Files that grow, streams that go elsewhere, programs that are started: where torch's users do it by themselves."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.compat.elastic.multiprocessing.redirects import redirect, redirect_stdout
from rallypoint.compat.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from rallypoint.compat.elastic.multiprocessing.tail_log import TailLog, tail_logfile
from rallypoint.compat.numa.binding import AffinityMode, NumaOptions


class Watched(io.StringIO):
    """Says when something has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def write(self, text: str) -> int:
        with self.changed:
            self.changed.notify_all()
            return super().write(text)

    def until(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), 30), self.getvalue()


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    file, shown = tmp_path / "log", Watched()
    tail = TailLog("w", {3: str(file)}, shown, interval_sec=0.01).start()
    with open(file, "wb", buffering=0) as log:
        log.write(b"first\nsec")
        shown.until("first\n")
        log.write(b"ond\n\xff\nla")
        shown.until("\ufffd\n")
        assert shown.getvalue() == "[w3]:first\n[w3]:second\n[w3]:\ufffd\n"
        log.write(b"st")
        tail.stop()
    assert tail.stopped()
    assert shown.getvalue().endswith("[w3]:last")


def test_what_was_written_before_the_end_is_shown(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    (tmp_path / "log").write_text(text)
    shown, finished = io.StringIO(), threading.Event()
    finished.set()
    tail_logfile("", str(tmp_path / "log"), shown, finished, 600, lambda line: True)
    assert shown.getvalue() == text


def test_a_file_that_never_comes(tmp_path: Path) -> None:
    shown = io.StringIO()
    TailLog("w", {0: str(tmp_path / "none")}, shown, interval_sec=600).start().stop()
    assert shown.getvalue() == ""


def test_a_place_that_fails_is_no_exception(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("line\n")
    shown = io.StringIO()
    shown.close()
    tail = TailLog("w", {0: str(tmp_path / "log")}, shown).start()
    tail.stop()
    assert tail.stopped()


def test_output_comes_back_after_an_exception(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def write_and_raise() -> None:
        with redirect_stdout(str(tmp_path / "out")):
            os.write(1, b"inside\n")
            raise KeyError

    with pytest.raises(KeyError):
        write_and_raise()
    os.write(1, b"outside\n")
    assert (tmp_path / "out").read_text() == "inside\n"
    assert capfd.readouterr().out == "outside\n"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'stdlog' is not an output stream"), redirect("stdlog", str(tmp_path / "out")):
        pass


@pytest.mark.process
def test_a_program_and_what_it_has_started_are_ended(tmp_path: Path) -> None:
    child = "import os, time; print(os.fork(), flush=True); time.sleep(600)"
    read, write = os.pipe()
    handler = get_subprocess_handler(sys.executable, ("-c", child), {}, f"/dev/fd/{write}", str(tmp_path / "err"), 0)
    os.close(write)
    with open(read) as said:
        said.readline()
        handler.close()
        said.read()  # ends when nobody holds the other end: both are gone
    assert handler.proc.wait(30) == -signal.SIGTERM
    handler.close()


@pytest.mark.process
def test_a_program_that_cannot_be_run_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        get_subprocess_handler(str(tmp_path / "none"), (), {}, str(tmp_path / "out"), str(tmp_path / "err"), 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.process
def test_a_binding_that_cannot_be_may_be_done_without(tmp_path: Path) -> None:
    """This thread runs where it did before."""
    before = os.sched_getaffinity(0)
    options = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    handler = get_subprocess_handler(
        sys.executable, ("-c", "pass"), {}, str(tmp_path / "out"), str(tmp_path / "err"), 0, options
    )
    assert handler.proc.wait(60) == 0
    handler.close()
    assert os.sched_getaffinity(0) == before
