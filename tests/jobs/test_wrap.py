"""`--wrap`: a program in front of workers. The agent's actions on a worker reach the program behind it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from textwrap import indent

import pytest

from tests.jobs.launching import RALLYCTL, Job, Launcher
from tests.ports import free_port

WRAPPER = f"""#!{sys.executable}
import subprocess, sys, time
code = subprocess.call(sys.argv[1:])
print("writes its report", flush=True)
open("report").read()  # until the test lets it go on
"""
"""It runs the program as a child, has no handler for any signal, and ends with 0 whatever becomes of the program."""
UP = """
import os, signal, sys, time
def on_signal(number, _frame):
    print("caught", number, flush=True)
    if number == signal.SIGTERM:
        sys.exit(0)
signal.signal(signal.SIGTERM, on_signal)
signal.signal(signal.SIGUSR1, on_signal)
def waits_here():
    print("up", os.getpid(), os.getppid(), flush=True)
    while True:
        time.sleep(0.01)
waits_here()
"""


FOUND = """
import os, sys, time
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
def is_held(fdinfo):
    try:
        return f"Pid:\\t{os.getpid()}\\n" in open(fdinfo).read()
    except OSError:
        return False
agent = parent(parent(parent(os.getppid())))
while not any(is_held(f"/proc/{agent}/fdinfo/{fd}") for fd in os.listdir(f"/proc/{agent}/fdinfo")):
    time.sleep(0.001)
"""
"""It goes on when the agent has opened its pidfd."""


class Hiding:
    """A wrapper in the folder of a launcher, whose reports the test lets end."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.path = launcher.folder / "wrapper"
        self.path.write_text(WRAPPER)
        self.path.chmod(0o755)
        os.mkfifo(launcher.folder / "report")
        self._report = os.open(launcher.folder / "report", os.O_RDWR)

    def job(self, text: str, *flags: str) -> Job:
        return self._launcher("--standalone", f"--wrap={self.path}", *flags, self._launcher.script(text))

    def let_go(self) -> None:
        """Let reports end, also those that begin later."""
        fd, self._report = self._report, -1
        if fd >= 0:
            empty = self._launcher.folder / "empty"
            empty.write_text("")
            empty.replace(self._launcher.folder / "report")
            os.close(fd)


@pytest.fixture
def hiding(rallyrun: Launcher) -> Iterator[Hiding]:
    found = Hiding(rallyrun)
    yield found
    found.let_go()


def pids_of(job: Job) -> tuple[int, int]:
    """The program's, and that of the wrapper."""
    lines = job.until(lambda lines: any(line.startswith("up ") for line in lines), "the program runs")
    words = next(line for line in lines if line.startswith("up ")).split()
    return int(words[1]), int(words[2])


def test_ranks_are_named_anew_in_each_round(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        "import os\nprint('W', os.environ['RANK'], os.environ.get('W'), flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] + os.environ['RANK'] == '01': raise SystemExit(3)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': import time; time.sleep(600)"
    )
    command = "env W=%r-%l-%n-$((5678+%l))-%%"
    job = rallyrun(
        *("--standalone", "--nproc-per-node=3", "--max-restarts=1"), "--wrap", command, "--wrap-ranks=1-2", script
    )
    assert job.ends() == 0
    rounds = [f"1-1-{round_}-5679-%" for round_ in range(2)]
    assert {line for line in job.out if line.startswith("W 1")} == {f"W 1 {word}" for word in rounds}
    assert {line for line in job.out if line.startswith("W 0")} == {"W 0 None"}


def test_a_wrapper_cannot_hide_a_failure(rallyrun: Launcher, hiding: Hiding) -> None:
    if not kernel_tells():
        pytest.skip("needs Linux 6.15")
    hiding.let_go()
    for end, code in ("sys.exit(3)", "3"), ("os.kill(os.getpid(), 11)", "-11"), ("raise ValueError('boom')", "1"):
        job = hiding.job(f"{FOUND}{end}")
        assert job.ends() == 1
        assert f"exitcode  : {code} " in job.err
        assert "(its wrapper wrapper exited with code 0)" in job.err
    assert "ValueError: boom" in job.err


def kernel_tells() -> bool:
    """Whether the kernel tells how a process has ended that is nobody's child here."""
    from rallypoint.features.wrap.program import exit_code

    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
    fd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    try:
        return exit_code(pid, fd) == 3
    finally:
        os.close(fd)


def test_a_wrapper_that_fails_fails_the_worker(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--wrap", "sh -c '\"$@\"; exit 7' sh", rallyrun.script("print('fine')"))
    assert job.ends() == 1
    assert "exitcode  : 7 " in job.err


def test_signals_and_the_stop_go_to_the_program(rallyrun: Launcher, hiding: Hiding) -> None:
    job = hiding.job(UP, "--signals-to-handle=SIGTERM,SIGUSR1")
    program, wrapper = pids_of(job)
    job.signal(signal.SIGUSR1)
    job.until(lambda lines: f"caught {signal.SIGUSR1:d}" in lines, "the program has it")
    job.signal(signal.SIGTERM)
    job.until(lambda lines: "writes its report" in lines, "the wrapper goes on after the program")
    assert f"caught {signal.SIGTERM:d}" in job.out
    assert f"Sending process {program} closing signal SIGTERM" in job.err
    rallyrun.until_gone(program)
    hiding.let_go()
    job.ends()
    assert "SIGKILL" not in job.err
    rallyrun.until_gone(wrapper)


def test_both_are_killed_when_the_time_is_over(rallyrun: Launcher, hiding: Hiding) -> None:
    job = hiding.job(UP, "--shutdown-timeout=1")
    program, wrapper = pids_of(job)
    job.signal(signal.SIGTERM)
    job.ends()
    assert f"caught {signal.SIGTERM:d}" in job.out
    assert "did not end within 1 s; sending SIGKILL" in job.err
    for pid in program, wrapper:
        rallyrun.until_gone(pid)


def test_stacks_and_the_pid_in_a_status_are_those_of_the_program(rallyrun: Launcher, hiding: Hiding) -> None:
    where = f"127.0.0.1:{free_port()}"
    hiding.let_go()
    job = rallyrun(
        *("--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={where}", "--rdzv-id=job"),
        *(f"--wrap={hiding.path}", rallyrun.script(UP)),
    )
    program, _ = pids_of(job)
    asked = {verb: rallyrun.command([*RALLYCTL, *verb.split(), where]) for verb in ("stacks", "status --json")}
    assert [each.ends() for each in asked.values()] == [0, 0]
    assert "waits_here" in "\n".join(asked["stacks"].out)
    status = json.loads("\n".join(asked["status --json"].out))
    assert [node["workers"]["pids"] for node in status["nodes"]] == [[program]]


def test_a_program_that_spins_behind_its_wrapper_hangs(rallyrun: Launcher, hiding: Hiding) -> None:
    hiding.let_go()
    spins = "def spins():\n    while True: pass\nspins()"
    job = hiding.job(spins, "--hang-timeout=2", "--on-hang=fail", "--log-dir=logs")
    assert job.ends() == 124
    assert "spins, script.py:2" in job.err


def test_a_wrapper_that_leaves_its_program_is_a_failure(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--wrap=setsid", rallyrun.script(UP))
    assert job.ends() == 1
    assert "its wrapper setsid exited while the program behind it (pid" in job.err
    assert "use a wrapper that waits for its program or replaces itself with it (exec)" in job.err


def test_a_module_of_python_runs_the_script_itself(rallyrun: Launcher) -> None:
    script = rallyrun.script("import sys\nprint(sys.argv[1:], flush=True)")
    job = rallyrun("--standalone", "--wrap", f"{sys.executable} -m cProfile -o profile%r", script, "--lr=1")
    assert job.ends() == 0
    assert job.out == ["['--lr=1']"]
    assert (rallyrun.folder / "profile0").exists()


def test_other_ranks_are_forked_from_what_is_preloaded(rallyrun: Launcher) -> None:
    script = rallyrun.script("import os, sys\nprint(os.environ['RANK'], os.environ.get('W'), flush=True)")
    job = rallyrun(
        *("--standalone", "--nproc-per-node=2", "--preload=json", "--wrap=env W=1", "--wrap-ranks=0"),
        script,
        env={"LOGLEVEL": "INFO"},
    )
    assert job.ends() == 0
    assert sorted(line for line in job.out if line[:1] in "01") == ["0 1", "1 None"]
    assert "workers will be forked from process" in job.err


def test_ranks_that_the_job_has_not_are_named(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--wrap=env", "--wrap-ranks=4", rallyrun.script(""))
    assert job.ends() == 0
    assert "--wrap-ranks lists none of the 1 ranks of this round, so no worker is wrapped" in job.err


def test_functions_are_refused_before_a_rendezvous(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--wrap=env", "--run-path", rallyrun.script("print('ran')"))
    assert job.ends() == 2
    assert "--wrap=env: the workers are functions, but a wrapper can run only programs" in job.err
    assert job.out == []


PEERS = """
import socket
if os.environ["RANK"] == "1":
    listener = socket.create_server(("127.0.0.1", 0))
    open("port.new", "w").write(str(listener.getsockname()[1]))
    os.rename("port.new", "port")
    listener.accept()[0].recv(1)
    os._exit(3)
while not os.path.exists("port"):
    time.sleep(0.01)
peer = socket.create_connection(("127.0.0.1", int(open("port").read())))
peer.sendall(b"x")
peer.recv(1)
raise ConnectionResetError("Connection closed by peer [127.0.0.1]")
"""
"""Rank 0 fails since rank 1 has failed, whose wrapper goes on."""


def test_a_failure_behind_a_wrapper_is_found_before_that_has_ended(rallyrun: Launcher, hiding: Hiding) -> None:
    if not kernel_tells():
        pytest.skip("needs Linux 6.15")
    text = f"import os, time\nif os.environ['RANK'] == '1':\n{indent(FOUND, '    ')}\n{PEERS}"
    job = hiding.job(text, "--nproc-per-node=2", "--wrap-ranks=1")
    job.until_err("failed (exitcode: 3) local_rank: 1")
    hiding.let_go()
    assert job.ends() == 1
    root = job.err.partition("Root Cause")[2]
    assert "rank      : 1 " in root
    assert "it exited with code 3 (its --wrap command has not exited)" in root
