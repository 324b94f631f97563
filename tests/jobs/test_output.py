"""The output of workers, whatever they write and however they end: real jobs, files and consoles."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.jobs.launching import RALLYRUN, Launcher
from tests.ports import free_port

SAY = """
import os, signal, sys
def say(stream, data):
    while data:
        data = data[os.write(stream, data):]
"""


def _files(logs: Path) -> dict[str, bytes]:
    """Path below the job's folder to what is in it, of a folder of one job."""
    (job,) = logs.iterdir()
    return {str(path.relative_to(job)): path.read_bytes() for path in logs.rglob("*.log")}


# Whose files


def test_a_round_leaves_the_files_of_the_one_before_it_alone(rallyrun: Launcher) -> None:
    """A new node ends the first round; no restart is counted, so both rounds are attempt 0."""
    script = rallyrun.script(
        SAY
        + """
say(1, b"in a world of %s\\n" % os.environb[b"WORLD_SIZE"])
if os.environ["WORLD_SIZE"] == "1":
    signal.pause()
"""
    )
    meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=x", "--rdzv-conf=last_call_timeout=1", "--tee=1"]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    first = rallyrun(*meeting, endpoint, f"--log-dir={rallyrun.folder / 'first'}", script)
    first.until(lambda lines: lines == ["[default0]:in a world of 1"], "the first node is alone")
    second = rallyrun(*meeting, endpoint, f"--log-dir={rallyrun.folder / 'second'}", script)
    assert [first.ends(), second.ends()] == [0, 0]
    assert _files(rallyrun.folder / "first") == {
        "attempt_0/0/stdout.log": b"in a world of 1\n",
        "attempt_0.1/0/stdout.log": b"in a world of 2\n",
    }
    assert _files(rallyrun.folder / "second") == {"attempt_0/0/stdout.log": b"in a world of 2\n"}


def test_jobs_with_one_name_and_one_folder_have_files_of_their_own(rallyrun: Launcher) -> None:
    logs = rallyrun.folder / "logs"
    script = rallyrun.script(SAY + 'say(1, f"I am {sys.argv[1]}\\n".encode())\nassert input() == "end"\n')
    flags = [f"--log-dir={logs}", "--standalone", "--rdzv-id=same", "--tee=1"]
    jobs, gates = [], []
    for name in ("one", "two"):
        os.mkfifo(rallyrun.folder / name)
        command = shlex.join([*RALLYRUN, *flags, script, name])
        jobs.append(rallyrun.command(["/bin/sh", "-c", f"exec {command} <{name}"]))
        gates.append((rallyrun.folder / name).open("w"))
    for job in jobs:
        job.until(bool, "it has spoken, so both are there at once")
    for gate in gates:
        gate.write("end\n")
        gate.close()
    assert [job.ends() for job in jobs] == [0, 0]
    later = rallyrun(*flags, rallyrun.script(SAY + 'say(1, b"I am three\\n")', "later.py"))
    assert later.ends() == 0
    found = {path: path.read_text() for path in logs.rglob("stdout.log")}
    assert sorted(found.values()) == ["I am one\n", "I am three\n", "I am two\n"]
    assert len({path.relative_to(logs).parts[0] for path in found}) == 3


def test_nodes_that_share_a_folder_say_where_each_rank_is(rallyrun: Launcher) -> None:
    logs = rallyrun.folder / "logs"
    flags = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--nproc-per-node=2"]
    script = rallyrun.script(SAY + 'say(1, os.environb[b"RANK"])\n')
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--log-dir={logs}", "--redirects=3", script]
    jobs = [rallyrun(*flags, *where) for _ in range(2)]
    assert [job.ends() for job in jobs] == [0, 0]
    found = {path.parent.name: path.read_text() for path in logs.glob("*/rank_*/stdout.log")}
    assert found == {f"rank_{rank}_attempt_0": str(rank) for rank in range(4)}
    assert len(list(logs.glob(f"job_{os.uname().nodename}_*"))) == 2
    for job in jobs:
        (line,) = [line for line in job.err.split("\n") if "the workers' output goes only to files" in line]
        assert os.path.isdir(line.rpartition(" in ")[2])


def test_where_hidden_output_goes_is_said_once(rallyrun: Launcher) -> None:
    """Also where nobody has named a folder; and a restart does not say it again."""
    script = rallyrun.script(SAY + 'say(1, b"hidden")\nsys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")\n')
    job = rallyrun("--standalone", "--max-restarts=1", "--redirects=1", script)
    assert job.ends() == 0
    (line,) = [line for line in job.err.split("\n") if "the workers' output goes only to files: stdout.log in " in line]
    attempt = Path(line.rpartition(" in ")[2])
    assert (attempt / "stdout.log").read_text() == "hidden"
    shutil.rmtree(attempt.parents[2])


def test_merged_lines_of_two_nodes_tell_the_host(rallyrun: Launcher) -> None:
    """Under srun: our log, the report and what is teed; workers' own bytes are left as they are."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"}
    script = rallyrun.script(SAY + "say(1, b'teed\\n')\nsay(2, b'raw\\n')\nsys.exit(3)\n")
    flags = ["--standalone", "--tee=1", f"--log-dir={rallyrun.folder / 'logs'}", script]
    job = rallyrun(*flags, env=step)
    assert job.ends() == 1
    host = os.uname().nodename
    assert job.out == [f"{host}: [default0]:teed"]
    ours = [line for line in job.err.split("\n") if line != "raw"]
    assert f"{host}: {script} FAILED" in ours
    assert [line for line in ours if not line.startswith(f"{host}: ")] == []
    quiet = rallyrun("--host-prefix=never", *flags, env=step)
    assert quiet.ends() == 1
    assert quiet.out == ["[default0]:teed"]
    assert f"{host}: " not in quiet.err


# What is written


def test_lines_that_come_in_parts_from_many_workers_are_never_mixed(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        SAY
        + """
name = b"abcdefgh"[int(os.environ["RANK"]):][:1]
for number in range(300):
    say(1 + number % 2, name * 40)
    say(1 + number % 2, name * (number % 50) + b" %d" % number)
    say(1 + number % 2, b"\\n")
"""
    )
    flags = [f"--log-dir={rallyrun.folder / 'logs'}", "--standalone", "--nproc-per-node=8", "--tee=3"]
    job = rallyrun.command(["/bin/sh", "-c", f"exec {shlex.join([*RALLYRUN, *flags, script])} 2>&1"])
    assert job.ends() == 0
    ours = [line for line in job.out if line.startswith("[default")]
    assert len(ours) == 8 * 300
    for rank, name in enumerate("abcdefgh"):
        mine = {line for line in ours if line.startswith(f"[default{rank}]:")}
        assert mine == {f"[default{rank}]:{name * (40 + number % 50)} {number}" for number in range(300)}


def test_each_line_before_a_restart_is_shown_once_and_in_order(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        SAY
        + """
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for stream in (1, 2):
    say(stream, b"".join(b"%d.%d.%d\\n" % (start, stream, number) for number in range(5000)))
sys.exit(start < 4)
"""
    )
    job = rallyrun(f"--log-dir={rallyrun.folder / 'logs'}", "--standalone", "--max-restarts=4", "--tee=3", script)
    assert job.ends() == 0
    for stream, lines in ((1, job.out), (2, job.err.split("\n"))):
        shown = [line for line in lines if line.startswith("[default0]:")]
        assert shown == [f"[default0]:{start}.{stream}.{number}" for start in range(5) for number in range(5000)]


# How they end


@pytest.mark.parametrize(
    ("flags", "death", "end"),
    [
        (["--tee=3"], "os.kill(os.getpid(), signal.SIGKILL)", ""),
        (["--redirects=3"], "os._exit(3)", ""),
        ([], "os.kill(os.getpid(), signal.SIGKILL)", "\\n"),
    ],
)
def test_the_last_bytes_before_a_death_are_never_lost(
    rallyrun: Launcher, flags: list[str], death: str, end: str
) -> None:
    # Less than a pipe holds: our own log lines come by another way, and could cut what has to wait for the reader.
    logs = rallyrun.folder / "logs"
    script = rallyrun.script(
        SAY + f'for stream in (1, 2):\n    say(stream, b"z" * 30_000 + b"\\nlast words{end}")\n{death}\n'
    )
    job = rallyrun(f"--log-dir={logs}", "--standalone", *flags, script)
    assert job.ends() == 1
    report = job.err[job.err.index("Root Cause") :]
    assert "last words" in report, "the report shows them"
    written = b"z" * 30_000 + b"\nlast words" + (b"\n" if end else b"")
    if flags:
        assert _files(logs) == {f"attempt_0/0/std{stream}.log": written for stream in ("out", "err")}
    if flags != ["--redirects=3"]:
        prefix = "[default0]:" if flags else ""
        assert job.out == [prefix + "z" * 30_000, prefix + "last words"]
        assert prefix + "z" * 30_000 in job.err.split("\n")
        before = job.err[: job.err.index("Root Cause")]
        assert re.search(rf"^{re.escape(prefix)}last words", before, re.MULTILINE), "and so does the console"


def test_the_last_words_of_the_launcher_s_victims_are_carried_too(rallyrun: Launcher) -> None:
    """A worker that is stopped because another has failed may still say something."""
    script = rallyrun.script(
        SAY
        + """
import pathlib, time
if os.environ["RANK"] == "0":
    while not pathlib.Path("ready").exists():
        time.sleep(0.01)
    sys.exit(1)
def stopped(*_):
    say(1, b"stopped in the middle")
    os._exit(0)
signal.signal(signal.SIGTERM, stopped)
pathlib.Path("ready").touch()
while True:
    time.sleep(0.02)  # a signal right before a pause would not end it
"""
    )
    logs = rallyrun.folder / "logs"
    job = rallyrun(f"--log-dir={logs}", "--standalone", "--nproc-per-node=2", "--tee=1", script)
    assert job.ends() == 1
    assert job.out == ["[default1]:stopped in the middle"]


def test_a_console_that_closes_early_costs_the_job_nothing(rallyrun: Launcher) -> None:
    """`rallyrun | head -1`: the files are complete, and the job ends well."""
    logs, done = rallyrun.folder / "logs", rallyrun.folder / "done"
    script = rallyrun.script(SAY + "for number in range(100_000):\n    say(1, b'line %d\\n' % number)\n")
    command = shlex.join([*RALLYRUN, f"--log-dir={logs}", "--standalone", "--tee=3", script])
    shell = f"({command}; echo $? >{shlex.quote(str(done))}) | head -n 1"
    ran = subprocess.run(
        ["/bin/sh", "-c", shell],
        check=False,
        env=rallyrun.environment(),
        cwd=rallyrun.folder,
        capture_output=True,
        timeout=100,
    )
    assert ran.stdout == b"[default0]:line 0\n"
    assert done.read_text() == "0\n", ran.stderr.decode(errors="replace")
    (file,) = logs.rglob("stdout.log")
    assert file.read_bytes() == b"".join(b"line %d\n" % number for number in range(100_000))
