"""Reading /proc, and the results if it shows nothing."""

from __future__ import annotations

import os
import signal

import pytest

from rallypoint.base import procfs
from rallypoint.base.process_table import process_table, read_stat
from rallypoint.base.procfs import has_signal_handler, inherited_settings
from tests.processes import no_descriptors


def test_read_stat() -> None:
    stat = read_stat(os.getpid())
    assert stat is not None
    assert (stat.pid, stat.parent, stat.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert process_table()[os.getpid()].parent == os.getppid()


def test_unreadable_processes() -> None:
    """As under `hidepid`."""
    assert read_stat(1 << 22) is None
    with no_descriptors():
        assert read_stat(os.getpid()) is None
        assert not has_signal_handler(os.getpid(), signal.SIGINT)


def test_inherited_settings_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    umask, former = os.umask(0o027), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with_proc = inherited_settings()
        with no_descriptors():
            without = inherited_settings()
        monkeypatch.setattr(procfs, "_status", lambda _pid: {"SigIgn": "0"})  # an old kernel
        assert inherited_settings().umask == 0o027
    finally:
        signal.signal(signal.SIGUSR1, former)
        assert os.umask(umask) == 0o027
    assert with_proc.umask == without.umask == 0o027
    assert signal.SIGUSR1 in without.ignored
    assert {number for number in with_proc.ignored if number < 32} == without.ignored
