"""The evidence of a node about real workers, in each state that a hang can leave them in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.agent.facts import WorkerFacts
from rallypoint.base.process_table import process_table
from rallypoint.base.procfs import read_proc_state
from rallypoint.features.flight_recorder import ENTRIES, constant_variables, switch_on
from rallypoint.features.hangs.evidence import collect
from rallypoint.features.preload.forkable import untracked_read
from rallypoint.observe.hangs.dumps import (
    BUFFER,
    DUMP,
    DUMP_ON_TIMEOUT,
    OLD_NAMES,
    PER_WORKER,
    PIPE,
    SOCKET,
    recorder_of,
)
from rallypoint.observe.hangs.evidence import ExaminedNode, ExaminedWorker, collect_evidence, stacks_of_workers
from rallypoint.observe.hangs.messages import NodeEvidence, decode_evidence, encode_evidence
from rallypoint.observe.hangs.report import groups_of, report_lines
from rallypoint.workers.context import SubprocessContext
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.processes import completed
from tests.unit.agent.test_incident import node_of
from tests.waiting import until

WAITS_FOR_A_CHILD = """
import multiprocessing, time

def read():
    print("up", flush=True); time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    reads = multiprocessing.Process(target=read, daemon=True)
    reads.start()
    reads.join()
"""


def as_sent(node: ExaminedNode) -> NodeEvidence:
    """The evidence of a node as its receivers decode it."""
    return decode_evidence(encode_evidence(collect_evidence(node)))


@contextmanager
def started(folder: Path, code: str) -> Iterator[int]:
    """The pid of a script, which is killed at the end with its children."""
    script = folder / "train.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process.pid
        finally:
            for pid in [pid for pid, other in process_table().items() if other.parent == process.pid]:
                os.kill(pid, signal.SIGKILL)
            process.kill()


@pytest.mark.process
def test_evidence_of_workers_and_their_children_is_kept(tmp_path: Path) -> None:
    """Workers that sleep, are stopped or in the kernel are in tests/jobs/test_hangs.py."""
    folder = tmp_path / "attempt_0"
    with started(tmp_path, WAITS_FOR_A_CHILD) as parent, subprocess.Popen(["/bin/true"]) as ended:
        until(lambda: "join (" in stacks_of_workers({0: parent})[0].text)
        until(lambda: read_proc_state(ended.pid) == "Z")
        workers = (ExaminedWorker(0, parent), ExaminedWorker(1, ended.pid), ExaminedWorker(2, 2**22 + 7))
        node = ExaminedNode("n1", (*workers, ExaminedWorker(3, 0, 3)), str(folder))
        found = as_sent(node)
        again = as_sent(node)
    names = {group.ranks: group.situation.headline for group in groups_of(found.ranks)}
    assert names[0,] == "join, train.py:11"
    assert names[1,].startswith("a zombie")
    assert names[2,].startswith("gone")
    assert names[3,] == "ended with exit code 3"
    (child,) = found.ranks[0].children
    assert child.frames[0].function == "read"
    assert not any(rank.children for rank in found.ranks[1:])
    kept = Path(found.kept)
    assert kept == folder / "hang.0.txt"
    assert Path(again.kept) == folder / "hang.1.txt"
    text = kept.read_text()
    assert "== rank 3: ended with exit code 3" in text
    assert f"read ({tmp_path}/train.py:5)" in text
    assert "-- process " in text
    assert "    1 child process: read, train.py:5" in report_lines([found])
    assert report_lines([found])[-1] == f"  full evidence: {kept} on n1"


DENIED = """
import ctypes, os, sys
from rallypoint.observe.hangs.evidence import ExaminedNode, ExaminedWorker, collect_evidence
from rallypoint.observe.hangs.messages import decode_evidence, encode_evidence
from rallypoint.observe.hangs.report import report_lines

PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19
if len(sys.argv) == 2:
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)  # for the next program
    os.execv(sys.executable, [*sys.orig_argv, "again"])
node = ExaminedNode("n1", (ExaminedWorker(0, int(sys.argv[1])), ExaminedWorker(1, int(sys.argv[1]))))
print("\\n".join(report_lines([decode_evidence(encode_evidence(collect_evidence(node)))])))
"""
CANNOT_BE_READ = """
import ctypes, time
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_an_unreadable_process_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with started(tmp_path, CANNOT_BE_READ) as target:
        lines = completed([sys.executable, "-c", DENIED, str(target)], check=True).stdout.splitlines()
    assert lines[0].startswith("  2 ranks (0-1): sleeping")
    (why,) = [line for line in lines if "no Python stacks" in line]
    assert "from 2 ranks (0-1) on n1: " in why
    assert "CAP_SYS_PTRACE" in why


@pytest.mark.process
@pytest.mark.parametrize("action", ["report", "fail"])
def test_workers_without_stacks_show_them_when_they_are_stopped(tmp_path: Path, action: str) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as sleeps:
        made = context(tmp_path / "logs")
        workers = (
            WorkerFacts(4, 0, sleeps.pid, None, "", "", "", {}, bytes),
            WorkerFacts(5, 1, 0, 0, "", "", "", {}, bytes),
        )
        found = decode_evidence(collect(node_of(workers[0])._replace(processes=workers), made, action))
        sleeps.kill()
    (line,) = [line for line in report_lines([found]) if "no Python stacks from 1 rank (4) on host" in line]
    assert line.endswith("; they follow when the workers are stopped") == (action == "fail")
    assert made.without_stacks == ({0} if action == "fail" else set())


def test_evidence_without_a_folder_or_workers(tmp_path: Path) -> None:
    assert as_sent(ExaminedNode("n1", ())).ranks == ()
    (tmp_path / "file").write_text("")
    found = as_sent(ExaminedNode("n1", (ExaminedWorker(0, 0, -9),), str(tmp_path / "file")))
    assert (found.kept, found.ranks[0].exit_code) == ("", -9)


def context(folder: Path, **environment: str) -> SubprocessContext:
    envs = {0: {"RANK": "4", **environment}, 1: {"RANK": "5"}}
    return SubprocessContext("t", "/bin/true", {0: (), 1: ()}, envs, DefaultLogsSpecs(str(folder)))


def test_variables_of_the_flight_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BUFFER, DUMP, PIPE, SOCKET, DUMP_ON_TIMEOUT, *OLD_NAMES.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    notices = Path("notices")  # the path of a socket must be short
    made = context(tmp_path / "logs", **{PIPE: "/mine_"})
    switch_on(made, str(notices), None)
    attempt = Path(made.error_files[0]).parents[1]
    assert made.envs[1] == {
        "RANK": "5",
        "TORCHELASTIC_ERROR_FILE": str(attempt / "1/error.json"),
        DUMP: str(attempt / "flight_recorder/rank_"),
        PIPE: str(notices / "flight_recorder_"),
        SOCKET: str(notices / "worker_server_1"),
    }
    assert constant_variables(os.environ) == {BUFFER: str(ENTRIES), DUMP_ON_TIMEOUT: "1"}
    assert constant_variables({OLD_NAMES[BUFFER]: "77"}) == {DUMP_ON_TIMEOUT: "1"}
    assert made.envs[0][PIPE] == "/mine_"
    assert (attempt / "flight_recorder").is_dir()
    assert untracked_read(PER_WORKER) is None, "workers could not be forked"
    recorder = recorder_of(5, made.envs[1])
    assert recorder is not None
    assert recorder.pipe == str(notices / "flight_recorder_5.pipe")
    assert json.dumps(recorder)
    monkeypatch.setenv(OLD_NAMES[DUMP], "/mine/rank_")
    other = context(tmp_path / "logs")
    switch_on(other, "", None)
    assert other.envs[0].keys() & {DUMP, PIPE, SOCKET} == set()


def test_without_a_log_folder_torch_chooses_the_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = context(Path(os.devnull))
    switch_on(made, str(tmp_path / ("n" * 100)), None)
    assert DUMP not in made.envs[0]
    assert SOCKET not in made.envs[0]
    assert "flight recorder dumps go to torch's default folder" in caplog.text
