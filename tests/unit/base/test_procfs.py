"""Reading /proc, and the results where /proc shows nothing."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from rallypoint.base import procfs
from rallypoint.base.process_table import process_table, read_stat
from rallypoint.base.procfs import has_signal_handler, inherited_settings


def test_a_process_that_is_there() -> None:
    stat = read_stat(os.getpid())
    assert stat is not None
    assert (stat.pid, stat.parent, stat.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert process_table()[os.getpid()].parent == os.getppid()


def test_a_process_that_cannot_be_read_counts_as_none() -> None:
    """As under `hidepid`, whatever the kernel's reason."""
    assert read_stat(1 << 22) is None
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, former[1]))
    try:
        assert read_stat(os.getpid()) is None
        assert not has_signal_handler(os.getpid(), signal.SIGINT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_what_we_hand_on_is_known_without_proc_too() -> None:
    umask, former = os.umask(0o027), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with_proc = inherited_settings()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, files[1]))
        without = inherited_settings()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        signal.signal(signal.SIGUSR1, former)
        assert os.umask(umask) == 0o027
    assert with_proc.umask == without.umask == 0o027
    assert signal.SIGUSR1 in without.ignored
    assert {number for number in with_proc.ignored if number < 32} == without.ignored


def test_a_kernel_without_the_umask_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "_status", lambda _pid: {"SigIgn": "0"})
    before = os.umask(0o022)
    os.umask(before)
    assert inherited_settings().umask == before
