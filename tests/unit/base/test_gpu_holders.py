"""Processes that hold GPU memory: their relation to an agent, and their names in messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pwd import getpwuid

import pytest

from rallypoint.base import gpu_holders
from rallypoint.base.gpu_holders import Holder, Share, amount, describe_process, held_by, holder, visible_gpus
from rallypoint.base.nvml import GpuMemory
from rallypoint.base.vendors import Device

GIB = 1 << 30
LAST_PID = (1 << 22) - 1
"""The highest pid of Linux, which is not in use."""


@pytest.mark.process
def test_holders() -> None:
    own, grandparent = os.getpid(), os.getppid()
    assert holder(own, own, "") is Holder.OURS
    assert holder(grandparent, own, "job") is Holder.OTHER
    assert holder(LAST_PID, own, "") is Holder.ENDED
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert holder(child.pid, own, "") is Holder.OURS
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert holder(child.pid, own, "") is Holder.ENDED, "a zombie"
    child.communicate()
    assert holder(child.pid, own, "") is Holder.ENDED


@pytest.mark.process
def test_processes_of_other_agents_of_the_job_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "job-7"}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert child.stdout is not None
    child.stdout.readline()  # now /proc shows its own variables
    assert holder(child.pid, LAST_PID, "job-7") is Holder.OURS
    assert holder(child.pid, LAST_PID, "job-") is Holder.OTHER
    assert holder(child.pid, LAST_PID, "") is Holder.OTHER
    child.communicate(b"\n")
    monkeypatch.setattr(gpu_holders, "read_stat", lambda _pid: None)
    assert holder(os.getpid(), os.getpid(), "") is Holder.OTHER, "a process that /proc hides has not ended"


def test_describe_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/proc/self/comm", encoding="utf-8") as file:
        name = file.read().strip()
    user = getpwuid(os.geteuid()).pw_name
    assert describe_process(os.getpid()) == f"pid {os.getpid()} ({name}, user {user})"
    assert describe_process(LAST_PID) == f"pid {LAST_PID}"
    monkeypatch.setattr(gpu_holders, "process_user", lambda _pid: 4_000_000_000)
    assert describe_process(os.getpid()).endswith(", user 4000000000)")


def test_held_by() -> None:
    shares = [Share(0, 4711, 61 * GIB), Share(1, 9, None), Share(1, 4711, 300 << 20)]
    names = {4711: "pid 4711 (python, user bob)", 9: "pid 9"}
    assert held_by(shares, names) == [
        "GPU 0: 61 GiB, GPU 1: 300 MiB held by pid 4711 (python, user bob)",
        "GPU 1: memory held by pid 9",
    ]
    assert [amount(used) for used in (None, 0, GIB - 1, GIB)] == ["memory", "0 MiB", "1024 MiB", "1 GiB"]


@pytest.mark.parametrize(
    ("visible", "environ", "indexes"),
    [
        ([Device("0000:02:00.0", "")], {}, [1]),
        ([Device("", "GPU-a"), Device("0000:02:00.0", "GPU-b")], {}, [0, 1]),
        ([Device("", "")], {}, [0, 1, 2]),
        ([], {}, [0, 1, 2]),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, []),
        ([], {"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: list[Device], environ: dict[str, str], indexes: list[int]
) -> None:
    monkeypatch.setattr(gpu_holders, "cuda_devices", lambda _environ: visible)
    found = [GpuMemory("0000:01:00.0", "GPU-a"), GpuMemory("0000:02:00.0", "GPU-b"), GpuMemory()]
    assert [*visible_gpus(found, environ)] == indexes
