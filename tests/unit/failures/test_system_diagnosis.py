"""Evidence beyond the exit code: control groups, the kernel's log, shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.failures import failure as failure_module
from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import (
    SHARED_MEMORY,
    OomKills,
    ProcessFailure,
    bus_error,
    error_data,
    explain_signal,
    killed_for_memory,
    write_error_file,
)
from rallypoint.failures.report import failure_detail

KILLER = "killed by the kernel's out-of-memory killer"
LOG = b"""6,1,100,-;usb 1-1: new device
3,2,200,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:2048kB, file-rss:1kB, shmem-rss:1024kB, UID:0 pgtables:2kB oom_score_adj:0
3,3,300,-;Out of memory: Killed process 78 (a b) total-vm:9kB, anon-rss:1024kB, file-rss:1kB, shmem-rss:0kB, UID:0
"""  # noqa: E501


class Machine:
    """Files of the kernel."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mounted = folder / "groups"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def kills(self) -> OomKills:
        return OomKills(str(self.proc), str(self.mounted))

    def first(self, group: str, seen_at: str, kills: int) -> None:
        """Control groups v1."""
        self.write(self.proc / "self/cgroup", f"8:pids:/x\n4:cpu,memory:{group}\n0::/unified\n")
        folder = self.mounted / "memory" / seen_at
        self.write(folder / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(folder / "memory.stat", f"cache 1\nhierarchical_memory_limit {512 << 20}\n")

    def second(self, group: str, seen_at: str, kills: int, limits: dict[str, str]) -> None:
        """Control groups v2; `limits` by folder."""
        self.write(self.proc / "self/cgroup", f"0::{group}\n")
        folder = self.mounted / seen_at
        self.write(folder / "memory.events", f"low 0\noom 3\noom_kill {kills}\noom_group_kill 0\n")
        for name, limit in limits.items():
            self.write(self.mounted / name / "memory.max", limit + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(failure_module, "killed_for_memory", lambda: None)
    return Machine(tmp_path)


@pytest.mark.parametrize("seen_at", ["job/x", ""])  # on a machine and in a container
def test_control_groups_v1(machine: Machine, seen_at: str) -> None:
    machine.first("/job/x", seen_at, kills=3)
    kills = machine.kills()
    assert kills.reason(77, 1) == ""
    machine.first("/job/x", seen_at, kills=4)
    facts = "(control group /job/x: oom_kill rose from 3 to 4, limit 512 MB)"
    assert kills.reason(77, 1) == f"most likely {KILLER} {facts}"
    assert kills.reason(77, 2) == f"perhaps {KILLER} {facts}"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"job/x": "max", "job": str(64 << 20)}, "limit 64 MB"),
        ({"job/x": str(32 << 20), "job": str(64 << 20)}, "limit 32 MB"),
        ({"job/x": "max"}, "no limit but the machine's memory"),
    ],
)
def test_control_groups_v2(machine: Machine, limits: dict[str, str], words: str) -> None:
    machine.second("/job/x", "job/x", 0, limits)
    kills = machine.kills()
    machine.second("/job/x", "job/x", 2, limits)
    assert kills.reason(77, 1) == f"most likely {KILLER} (control group /job/x: oom_kill rose from 0 to 2, {words})"


def test_the_machine_s_counter(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/\n")  # the root group has no counter
    machine.write(machine.proc / "vmstat", "pgfault 7\noom_kill 5\n")
    kills = machine.kills()
    machine.write(machine.proc / "vmstat", "pgfault 7\noom_kill 6\n")
    assert kills.reason(77, 1) == f"perhaps {KILLER} (the machine's oom_kill rose from 5 to 6)"


def test_no_counters(machine: Machine) -> None:
    for text in ("", "nonsense", "0::/gone\n", "4:memory:\n", "4:cpu:/x\n"):
        machine.write(machine.proc / "self/cgroup", text)
        assert machine.kills().reason(77, 1) == ""


def test_the_kernel_s_log(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.first("/x", "x", kills=0)
    kills = machine.kills()
    monkeypatch.setattr(failure_module, "killed_for_memory", lambda: {77: 3 << 20})
    failure = ProcessFailure(0, 77, -9, "")
    explain_signal(failure, kills)
    assert not failure.settle(), "the pid of an earlier process"
    machine.first("/x", "x", kills=1)
    facts = "control group /x: oom_kill rose from 0 to 1, limit 512 MB)"
    somebody = f"killed by an unknown sender after another process was {KILLER} ("
    for pid, why in ((77, f"{KILLER} (it held 3 MB, "), (78, somebody)):
        failure = ProcessFailure(0, pid, -9, "")
        explain_signal(failure, kills, killed=0)
        text = f"Signal 9 (SIGKILL) received by PID {pid}: "
        assert failure.text == f"{text}most likely {KILLER} ({facts}", "the log is not read before it is announced"
        assert failure.settle()
        assert failure.text == f"{text}{why}{facts}"
        assert not failure.settle()


def test_reading_the_kernel_s_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, here = tmp_path / "log", tmp_path / "here"
    log.write_bytes(b"6,0,1,-;noise\n" * 1000 + LOG)
    here.touch()
    assert killed_for_memory(str(log), str(here)) is None, "pids of another namespace"
    monkeypatch.setattr(failure_module, "_FIRST_NAMESPACE", here.stat().st_ino)
    assert killed_for_memory(str(log), str(here)) == {77: 3 << 20, 78: 1 << 20}
    assert killed_for_memory(str(tmp_path / "none"), str(here)) is None


def test_bus_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 << 20
    for free, blamed in ((1 << 20, True), (32 << 20, False)):
        space = os.statvfs_result((4096, 4096, size // 4096, free // 4096, free // 4096, 9, 9, 9, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _, space=space: space)
        text = bus_error("/dev/shm")
        assert f"{free >> 20} MB of 64 MB free" in text
        assert ("/dev/shm is nearly full" in text) == blamed
        assert ("nothing behind it" in text) != blamed
    monkeypatch.undo()
    assert bus_error(str(tmp_path / "none")).endswith("truncated")


def test_explanations_follow_the_message(tmp_path: Path) -> None:
    failure = ProcessFailure(0, 77, -7, "")
    explain_signal(failure)
    assert failure.message == failure.reason == f"Signal 7 (SIGBUS) received by PID 77: {bus_error(SHARED_MEMORY)}"
    for exitcode in (-9, -11, -15):
        other = ProcessFailure(0, 77, exitcode, "")
        explain_signal(other)
        assert other.reason == ""
    path = str(tmp_path / "e")
    write_error_file(path, error_data("ValueError: boom", "Traceback\n", 1.0))
    recorded = ProcessFailure(0, 77, -7, path)
    explain_signal(recorded)
    assert recorded.text == "ValueError: boom"


def test_another_process_was_killed(machine: Machine, tmp_path: Path) -> None:
    machine.first("/x", "x", kills=0)
    kills = machine.kills()
    path = str(tmp_path / "e")
    write_error_file(path, error_data("RuntimeError: a loader died", "Traceback\nRuntimeError: a loader died\n", 1.0))
    for error_file, last_lines in ((path, b""), ("", b"words\n"), ("", b"")):
        failure = ProcessFailure(0, 77, 1, error_file, last_lines=last_lines)
        explain_signal(failure, kills)
        assert failure.context == ""
        machine.first("/x", "x", kills=2)
        explain_signal(failure, kills, killed=0)
        text = "has killed another process, most likely a child of a rank (control group /x, limit 512 MB)"
        cause = Cause.from_failure(failure, 0, "here")
        assert failure_detail(cause).endswith(text)
        assert ("last lines of standard error" in failure_detail(cause)) is bool(last_lines)
        assert failure.reason == ""
        machine.first("/x", "x", kills=0)


def test_a_child_was_killed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.first("/x", "x", kills=0)
    kills = machine.kills()
    machine.first("/x", "x", kills=1)
    monkeypatch.setattr(failure_module, "killed_for_memory", lambda: {66: 3 << 20})
    where = "control group /x, limit 512 MB"
    for output, expected in (
        (b"DataLoader worker (pid 66) is killed", f"a child of this rank (pid 66, it held 3 MB, {where})"),
        (b"DataLoader worker (pid 664) is killed", f"another process, most likely a child of a rank ({where})"),
    ):
        failure = ProcessFailure(0, 77, 1, "", last_lines=output)
        explain_signal(failure, kills, killed=0)
        failure.context += "\nrank 1 had ended with 0 before"
        assert bool(failure.settle()) is (b"66)" in output)
        assert failure.context.endswith(f"has killed {expected}\nrank 1 had ended with 0 before")
        assert not failure.settle()
    failure = ProcessFailure(0, 77, 1, "", last_lines=b"Connection closed by peer\n")
    explain_signal(failure, kills, killed=1)
    assert "has killed another rank (" in failure.context
