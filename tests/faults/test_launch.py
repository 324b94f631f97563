"""`rallyctl launch` over a real ssh, to hosts of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.ssh_hosts import SshHosts, ssh_hosts, why_not
from tests.jobs.launching import RALLYCTL, Job, Launcher, launching
from tests.waiting import until

ALL = "--hosts=n1,n2,n3"

WORKER = """
import os, sys, time
e = os.environ
os.write(1, f"rank {e['RANK']} of {e['WORLD_SIZE']} on {os.uname().nodename}: up\\n".encode())
while not os.path.exists("finish"):
    time.sleep(0.02)
    if os.path.exists(f"fail-{e['RANK']}"):
        sys.exit(5)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[SshHosts]:
    if (reason := why_not()) is not None:
        pytest.skip(f"SSH TESTS DID NOT RUN: {reason}")
    with ssh_hosts("n1", "n2", "n3") as made:
        yield made


@pytest.fixture
def hosts(machines: SshHosts, tmp_path: Path) -> Iterator[tuple[SshHosts, Launcher]]:
    with launching(tmp_path) as launcher:
        launcher.script(WORKER, "worker.py")
        yield machines, launcher
    machines.until_empty()


Fixture = tuple[SshHosts, Launcher]


def up(job: Job, world: int) -> None:
    """Wait until all workers of a world are up, each rank once."""
    job.until(
        lambda lines: all(any(f": rank {rank} of {world} on" in line for line in lines) for rank in range(world)),
        f"{world} workers are up",
    )


def commands(ssh: SshHosts) -> list[str]:
    """What runs on the hosts, but for sshd's sessions, which may end a moment after their clients."""
    return [line for lines in ssh.running().values() for line in lines if not line.startswith("sshd")]


def forget_temporary(launcher: Launcher) -> None:
    """Take away what is left of an agent that was killed together with its reaper."""
    shutil.rmtree(launcher.folder / "tmp")
    (launcher.folder / "tmp").mkdir()


def test_a_job_of_three_hosts(hosts: Fixture) -> None:
    """Nothing is said of how the nodes meet; ranks go by the order of the hosts, and slots are workers."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, "--hosts=n1:1,n2:2,n3:1", "--", "rallyrun", "worker.py")
    up(job, 4)
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert sorted(line for line in job.out if line.endswith("up")) == [
        "n1: rank 0 of 4 on n1: up",
        "n2: rank 1 of 4 on n2: up",
        "n2: rank 2 of 4 on n2: up",
        "n3: rank 3 of 4 on n3: up",
    ]
    assert job.err == ""


def test_a_job_survives_a_host(hosts: Fixture) -> None:
    """All that runs on a host is killed, sshd's part of it too: the job goes on without it, and decides how it ends."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, ALL, "--", "rallyrun", "--nnodes=2:3", "worker.py")
    up(job, 3)
    ssh.lose("n2")
    up(job, 2)
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert "n2: the connection was lost" in job.err
    assert "2 hosts continue" in job.err
    assert "the job succeeded without n2" in job.err
    forget_temporary(launcher)


def test_each_host_that_cannot_be_reached_has_its_line(hosts: Fixture) -> None:
    """And nothing is started on those that can."""
    ssh, launcher = hosts
    ssh.trust("n1", "n3")
    try:
        with ssh.hosts["n3"].unplugged():
            named = "n1,nowhere.invalid,deaf,denied,n2,n3,nobody@n1"
            job = ssh.launch(launcher, f"--hosts={named}", "--connect-timeout=2", "--", "touch", "started")
            assert job.ends() == 1
    finally:
        ssh.trust("n1", "n2", "n3")
    lines = job.err.splitlines()
    for name, words in {
        "nowhere.invalid": "its name is not known here",
        "deaf": "no ssh server listens there",
        "denied": "it accepts none of your keys",
        "n2": "its key is not in ~/.ssh/known_hosts",
        "n3": "no answer",
        "nobody@n1": "its login shell exited with code 1",
    }.items():
        (line,) = [line for line in lines if line.startswith(f"rallyctl: {name} ")]
        assert words in line
    assert lines[-1] == "rallyctl: error: 6 of 7 hosts cannot be used, so nothing was started; see above"
    assert len(lines) == 7
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--python=./other", "--", "true"], "n2 has Rallypoint 9.9, but "),
        (
            ["--chdir=/no/folder", "--", "true"],
            "n2 does not have the working folder '/no/folder' (No such file or directory)",
        ),
    ],
)
def test_what_hosts_do_not_have_is_said_before_the_start(hosts: Fixture, flags: list[str], words: str) -> None:
    ssh, launcher = hosts
    other = Path(
        launcher.script(
            """#!/bin/sh
echo 'rallypoint-supervisor {"type":"SupervisorHello","version":"9.9","address":""}'
exec cat
""",
            "other",
        )
    )
    other.chmod(0o755)
    job = ssh.launch(launcher, "--hosts=n1,n2", *[flag.replace("./other", str(other)) for flag in flags])
    assert job.ends() == 1
    assert words in job.err
    assert "2 of 2 hosts cannot be used, so nothing was started" in job.err


def test_exit_codes(hosts: Fixture) -> None:
    """Each command's code by the host's rank; ssh's own 255 is not taken for a lost connection."""
    ssh, launcher = hosts
    launcher.script("", "garbage")
    (launcher.folder / "garbage").chmod(0o755)
    own_kill = "test $PET_NODE_RANK = 1 || kill -9 $$"
    cases = {
        ("sh", "-c", "exit $((PET_NODE_RANK * 3))"): (3, ""),
        ("sh", "-c", "exit 255"): (255, ""),
        ("sh", "-c", own_kill): (0, "n1: sh was killed by SIGKILL"),
        ("./garbage",): (126, "cannot be run"),
        ("rallyrun", "missing.py"): (1, ""),
    }
    jobs = {command: ssh.launch(launcher, "--hosts=n1,n2", "--", *command) for command in cases}
    for command, (code, words) in cases.items():
        assert jobs[command].ends() == code, (command, jobs[command].err)
        assert words in jobs[command].err
        assert "lost" not in jobs[command].err


def test_values_travel_where_nobody_sees_them(hosts: Fixture) -> None:
    """Named variables arrive, and neither they nor the secret are on any command line."""
    ssh, launcher = hosts
    (launcher.folder / "variables").write_text("FROM_FILE=hidden-in-file\n# no\n")
    script = launcher.script("""
import os, sys, time
e = os.environ
names = ("NAMED", "FROM_FILE", "MY_A", "MY_B", "RALLYPOINT_SECRET", "PET_NNODES", "NOT_NAMED")
print(*(f"{name}={e.get(name)}" for name in names), sep="\\n", flush=True)
while not os.path.exists("finish"):
    time.sleep(0.02)
""")
    flags = ["--env=NAMED", "--env=MY_*", "--env=PET_NNODES=7", "--env-file=variables"]
    env = {"NAMED": "hidden-by-name", "MY_A": "hidden-a", "MY_B": "hidden-b", "NOT_NAMED": "x"}
    job = ssh.launch(launcher, "--hosts=n1,n2", *flags, "--", "python", script, env=env)
    lines = job.until(lambda lines: len(lines) == 14, "both have printed")
    first = sorted(line.removeprefix("n1: ") for line in lines if line.startswith("n1: "))
    secret = next(line for line in first if line.startswith("RALLYPOINT_SECRET=")).partition("=")[2]
    assert len(secret) == 43
    assert set(first) - {f"RALLYPOINT_SECRET={secret}"} == {
        *("NAMED=hidden-by-name", "FROM_FILE=hidden-in-file", "MY_A=hidden-a", "MY_B=hidden-b"),
        *("PET_NNODES=7", "NOT_NAMED=None"),
    }
    assert f"n2: RALLYPOINT_SECRET={secret}" in lines
    shown = "".join(Path(path).read_text() for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path))
    assert "rallypoint.clusters.remote.supervisor" in shown
    assert "hidden-" not in shown
    assert secret not in shown
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err


def _readable(path: Path) -> bool:
    try:
        path.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return True


def test_an_interrupt_ends_the_job_everywhere(hosts: Fixture) -> None:
    ssh, launcher = hosts
    job = ssh.launch(launcher, ALL, "--", "rallyrun", "worker.py")
    up(job, 3)
    job.signal(signal.SIGINT)
    assert job.ends() == 1
    assert not commands(ssh)
    assert job.err.count("stopped by SIGINT") == 3


def test_a_second_interrupt_kills(hosts: Fixture) -> None:
    """A command that wants no end, and what it has started in a session of its own."""
    ssh, launcher = hosts
    script = "trap 'echo heard' INT; setsid sleep 1000 & echo up; while :; do sleep 0.05; done"
    job = ssh.launch(launcher, "--hosts=n1,n2", "--", "bash", "-c", script)
    job.until(lambda lines: lines.count("n1: up") + lines.count("n2: up") == 2, "both are up")
    job.signal(signal.SIGINT)
    job.until(lambda lines: {"n1: heard", "n2: heard"} <= set(lines), "both have heard it")
    job.signal(signal.SIGINT)
    assert job.ends() == 128 + signal.SIGKILL
    assert not commands(ssh)


def test_what_a_login_shell_prints_is_no_answer(hosts: Fixture) -> None:
    ssh, launcher = hosts
    noisy = Path(
        launcher.script(
            f"""#!/bin/sh
echo Welcome >&2
printf 'Welcome\\n> '
exec {sys.executable} "$@"
""",
            "noisy",
        )
    )
    noisy.chmod(0o755)
    job = ssh.launch(launcher, "--hosts=n1", f"--python={noisy}", "--", "echo", "here")
    assert job.ends() == 0, job.err
    assert job.out == ["n1: here"]
    assert job.err == ""


def test_other_signals_reach_the_command(hosts: Fixture) -> None:
    ssh, launcher = hosts
    script = "trap 'echo heard; exit 7' USR1; echo up; while :; do sleep 0.05; done"
    job = ssh.launch(launcher, "--hosts=n1,n2", "--", "bash", "-c", script)
    job.until(lambda lines: {"n1: up", "n2: up"} <= set(lines), "both are up")
    job.signal(signal.SIGUSR1)
    assert job.ends() == 7
    assert sorted(job.out) == ["n1: heard", "n1: up", "n2: heard", "n2: up"]


def test_a_signal_during_the_probe(hosts: Fixture) -> None:
    ssh, launcher = hosts
    with ssh.hosts["n2"].unplugged():
        job = ssh.launch(launcher, "--hosts=n1,n2", "--connect-timeout=600", "--", "true")
        until(lambda: bool(ssh.pids("n1", "rallypoint.clusters.remote.supervisor")), "one host is reached")
        job.signal(signal.SIGINT)
        assert job.ends() in (130, -signal.SIGINT)


def test_a_launcher_that_is_killed_leaves_nothing(hosts: Fixture) -> None:
    ssh, launcher = hosts
    job = ssh.launch(launcher, ALL, "--", "rallyrun", "worker.py")
    up(job, 3)
    job.signal(signal.SIGKILL)
    job.ends()
    assert ssh.until_empty() < 25, "the grace period is 30 s"


def test_what_a_command_does_when_the_launcher_is_gone(hosts: Fixture) -> None:
    """It can save, and print as much as it likes meanwhile; one that wants no end is killed after the grace period."""
    ssh, launcher = hosts
    script = """
        if [ $PET_NODE_RANK = 0 ]; then trap 'seq 100000; touch saved; exit' TERM
        else trap 'touch asked' TERM; setsid sleep 999 & fi
        echo up; while :; do sleep 0.05; [ ! -e asked ] || touch given; done
    """
    job = ssh.launch(launcher, "--hosts=n1,n2", "--grace=2", "--", "bash", "-c", script)
    job.until(lambda lines: {"n1: up", "n2: up"} <= set(lines), "both are up")
    job.signal(signal.SIGKILL)
    job.ends()
    until((launcher.folder / "saved").exists, "the first has saved")
    until((launcher.folder / "given").exists, "the second was given time after it was asked to end")
    assert ssh.until_empty() < 60


def test_a_supervisor_that_is_killed_leaves_nothing(hosts: Fixture) -> None:
    """Its host counts as lost; the others cannot go on without it, which they are told."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, ALL, "--lost-after=2", "--", "rallyrun", "worker.py")
    up(job, 3)
    (supervisor,) = ssh.pids("n2", "rallypoint.clusters.remote.supervisor")
    os.kill(supervisor, signal.SIGKILL)
    assert job.ends() == 1
    assert "n2: the connection was lost" in job.err
    assert "fewer hosts are left than the 3 that the job needs, so the job is ending" in job.err
    forget_temporary(launcher)


def test_the_first_host_has_the_control_plane(hosts: Fixture) -> None:
    """Without it the others would wait for a host that nobody starts again."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, ALL, "--lost-after=2", "--", "rallyrun", "--nnodes=1:3", "worker.py")
    up(job, 3)
    ssh.lose("n1")
    assert job.ends() == 1
    assert "n1 hosted the control plane, so the job is ending" in job.err
    forget_temporary(launcher)


def test_a_control_plane_beside_the_hosts_outlives_each_of_them(hosts: Fixture) -> None:
    """Nodes and `rallyctl serve` share the secret of the file, which the launch reads here."""
    ssh, launcher = hosts
    (launcher.folder / "secret").write_text("a-secret-of-more-than-twenty-characters")
    (launcher.folder / "secret").chmod(0o600)
    env = {"RALLYPOINT_SECRET_FILE": str(launcher.folder / "secret")}
    endpoint = f"{ssh.login.address}:29400"
    serve = [*ssh.login.entry, *RALLYCTL, "serve", f"--endpoint={endpoint}"]
    server = launcher.command(serve, env)
    server.until_err("control plane listens")
    words = ["rallyrun", "--nnodes=2:3", f"--rdzv-endpoint={endpoint}", "worker.py"]
    job = ssh.launch(launcher, ALL, "--", *words, env=env)
    up(job, 3)
    ssh.lose("n1")
    up(job, 2)
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert "the job succeeded without n1" in job.err
    server.stop()
    forget_temporary(launcher)


def test_a_cut_link_leaves_nothing(hosts: Fixture) -> None:
    """Neither end is told: the host ends what runs there, and the others go on."""
    ssh, launcher = hosts
    job = ssh.launch(
        launcher, ALL, "--lost-after=8", "--", "rallyrun", "--nnodes=2:3", "--rdzv-conf=lease=4", "worker.py"
    )
    up(job, 3)
    with ssh.hosts["n3"].unplugged():
        up(job, 2)
        job.until_err("n3: the connection was lost")
        until(lambda: not ssh.pids("n3", "rally") and not ssh.pids("n3", "worker.py"), "nothing runs on n3")
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert "the job succeeded without n3" in job.err


def test_output_that_nobody_reads_for_a_while(hosts: Fixture) -> None:
    """Heartbeats go on: the hosts wait with their output and do not take the launcher for lost."""
    ssh, launcher = hosts
    words = ["--hosts=n1,n2", "--lost-after=6", "--", "seq", "200000"]
    with ssh.launch_into_pipe(launcher, *words) as process:
        assert process.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(10)
        lines = process.stdout.read().decode().splitlines()
        assert process.wait(120) == 0
    expected = [str(number) for number in range(1, 200001)]
    for name in ("n1", "n2"):
        assert [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")] == expected


def test_output_that_nobody_will_read(hosts: Fixture) -> None:
    """The job goes on, which is said."""
    ssh, launcher = hosts
    script = "echo first; while ! [ -e finish ]; do echo more; sleep 0.1; done; touch finished"
    with ssh.launch_into_pipe(launcher, "--hosts=n1", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"n1: first\n"
        process.stdout.close()
        expected = (
            "rallyctl: standard output cannot be written (Broken pipe); the job continues, and its output is lost\n"
        )
        assert process.stderr.readline().decode() == expected
        (launcher.folder / "finish").touch()
        assert process.wait(120) == 0
    assert (launcher.folder / "finished").exists()


def test_a_host_that_turns_connections_away_is_tried_again(hosts: Fixture) -> None:
    ssh, launcher = hosts
    job = ssh.launch(launcher, "--hosts=busy[1-9]", "--", "sh", "-c", "echo $PET_NODE_RANK")
    assert job.ends() == 0, job.err
    assert sorted(job.out) == [f"busy{rank + 1}: {rank}" for rank in range(9)]
    log = (ssh.folder / "n3.log").read_text()
    assert "MaxStartups" in log, "nobody was turned away"


def test_a_launch_from_one_of_the_hosts(hosts: Fixture) -> None:
    """It reaches itself by the loopback, which is of no use to the others: it finds an address towards them."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, "--hosts=here,n2", "--", "rallyrun", "worker.py", on=ssh.hosts["n1"])
    up(job, 2)
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err


def test_a_job_can_be_looked_at_and_stopped_on_its_hosts(hosts: Fixture) -> None:
    """Though nobody was told its secret: the agent tells its own user the token."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, "--hosts=n1,n2", "--", "rallyrun", "worker.py")
    up(job, 2)
    rallyctl = [*ssh.hosts["n2"].entry, *RALLYCTL]
    status = launcher.command([*rallyctl, "status"])
    assert status.ends() == 0, status.err
    assert "nodes     2 (min 2, max 2)" in status.out
    another = {"RALLYPOINT_SECRET": "another-secret-that-is-long-enough"}
    refused = launcher.command([*rallyctl, "stop", "worker.py"], another)
    assert refused.ends() == 1
    assert "is not the job's" in refused.err, refused.err
    assert launcher.command([*rallyctl, "stop", "worker.py"]).ends() == 0
    assert job.ends() == 1
    assert "stopped the job" in job.err


def test_hosts_with_ipv6_alone(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(f"SSH TESTS DID NOT RUN: {reason}")
    with ssh_hosts("n1", "n2", ipv6_only=True) as ssh, launching(tmp_path) as launcher:
        launcher.script(WORKER, "worker.py")
        (launcher.folder / "hosts").write_text("".join(f"[{ssh.addresses[name]}]:2\n" for name in ("n1", "n2")))
        job = ssh.launch(launcher, "--hostfile=hosts", "--", "rallyrun", "worker.py")
        up(job, 4)
        (launcher.folder / "finish").touch()
        assert job.ends() == 0, job.err
        assert all(line.startswith("fd77::") for line in job.out)
