"""`rallyrun --preflight`, and `rallyctl check` beside running jobs: control planes, secrets, bad input."""

from __future__ import annotations

import os
import re
import signal

import pytest

from rallypoint.base.secrets import new_secret
from tests.etcd_cluster import EtcdCluster
from tests.jobs.launching import RALLYCTL, RALLYRUN, AtOnce, Launcher
from tests.jobs.nodes import Nodes, all_end
from tests.ports import free_port

FEW_FILES = ["prlimit", "--nofile=200:200"]
"""A limit that is a FAIL, and enough for a job."""


def told(launcher: Launcher, *flags: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
    """The exit code of `rallyctl check`, and its lines by the name of the check."""
    job = launcher.command([*RALLYCTL, "check", *flags], env)
    code = job.ends()
    assert job.err == ""
    return code, {line.split()[1].rstrip(":"): line for line in job.out}


def clocks_agree(line: str) -> bool:
    """Whether one clock was found to be itself: as exactly as the time that the answer took allows."""
    found = re.match(r"PASS clock: the coordinator's clock is ([\d.]+) s .*, give or take ([\d.]+) s$", line)
    return found is not None and float(found[1]) <= float(found[2]) + 0.01


def test_a_node_that_has_failed_a_check_starts_no_worker(rallyrun: Launcher) -> None:
    script = rallyrun.script("open('ran', 'w')")
    for flags, code in (([], 1), (["--exit-codes=classified"], 75)):
        job = rallyrun.command([*FEW_FILES, *RALLYRUN, "--preflight=require", *flags, script])
        assert job.ends() == code
        errors = [line for line in job.err.splitlines() if line.startswith("rallyrun: error: ")]
        assert len(errors) == 1
        assert (
            "this node stays out of the job (--preflight=require): FAIL open-files: the limit of open files is 200"
            in errors[0]
        )
        assert "Traceback" not in job.err
    assert not (rallyrun.folder / "ran").exists()


def test_a_node_that_is_warned_runs_on(rallyrun: Launcher) -> None:
    script = rallyrun.script("open('ran', 'w')")
    env = {"LOGLEVEL": "INFO", "PET_PREFLIGHT": "warn"}
    job = rallyrun.command([*FEW_FILES, *RALLYRUN, script], env)
    assert job.ends() == 0, job.err
    warnings = [line for line in job.err.splitlines() if "FAIL open-files: the limit of open files is 200" in line]
    assert [line[0] for line in warnings] == ["W"]
    assert "preflight checks of this node: " in job.err
    assert (rallyrun.folder / "ran").exists()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor is all that this machine has")
def test_workers_that_share_one_processor_are_told_of(rallyrun: Launcher) -> None:
    first = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", first, *RALLYRUN, "--standalone", "--nproc-per-node=2"]
    job = rallyrun.command([*command, rallyrun.script("open('ran', 'w')")])
    assert job.ends() == 0, job.err
    assert len([line for line in job.err.splitlines() if "2 workers share 1 processor of " in line]) == 1
    check = rallyrun.command(["taskset", "-c", first, *RALLYCTL, "check", "--nproc-per-node=2"])
    assert check.ends() == 1
    assert [line for line in check.out if line.startswith("WARN cpus: 2 workers share 1 processor of ")]
    refused = rallyrun.command([*RALLYCTL, "check", "--nproc-per-node=several"])
    assert refused.ends() == 2
    assert "'several' is not a number of workers" in refused.err


def a_control_plane_outside_answers_for_any_job(launcher: Launcher) -> None:
    secret = {"RALLYPOINT_SECRET": new_secret()}
    server = launcher.command([*RALLYCTL, "serve", "--endpoint=127.0.0.1:0"], secret)
    server.until_err("control plane listens at")
    endpoint = f"--endpoint={server.err.split()[-1]}"
    for flags in ([], ["--rdzv-id=new"]):
        _, lines = told(launcher, endpoint, *flags, env=secret)
        assert lines["control-plane"].startswith("PASS control-plane: Rallypoint's control plane answers at 127.0.0.1:")
        assert clocks_agree(lines["clock"])
        assert lines["port"].startswith("PASS port: a process is listening")
    assert "refused" not in server.err
    code, lines = told(launcher, endpoint, "--require=clock")
    assert code == 2
    assert lines["control-plane"].startswith("FAIL control-plane: the control plane at ")
    assert "set RALLYPOINT_SECRET on this node" in lines["control-plane"]
    assert lines["clock"].startswith("FAIL clock: not checked: no control plane has reported")
    jobs = launcher.command([*RALLYCTL, "status", endpoint.removeprefix("--endpoint=")], secret)
    assert jobs.ends() == 0
    assert "new" not in "\n".join(jobs.out)
    server.signal(signal.SIGTERM)
    assert server.ends() == 0


def the_control_plane_of_a_job_answers_for_that_job(launcher: Launcher) -> None:
    for backend in ("c10d", "static"):
        port = free_port()
        job = Nodes(
            launcher,
            "--nnodes=2",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=mine",
            "--node-rank=0",
        )
        node = job.start("A")
        node.job.until_err("1 of 2 nodes have joined")
        flags = (f"--endpoint=127.0.0.1:{port}", f"--rdzv-backend={backend}")
        _, lines = told(launcher, *flags, "--rdzv-id=mine")
        assert lines["control-plane"].startswith("PASS control-plane: Rallypoint's control plane answers")
        code, lines = told(launcher, *flags, "--rdzv-id=other")
        assert code == 2
        assert "belongs to job 'mine', not to 'other'" in lines["control-plane"]
        assert node.job.err.count("1 of 2 nodes have joined") == 1, "nobody has joined"
        node.job.stop()


def test_a_job_on_etcd(rallyrun: Launcher, etcd: EtcdCluster) -> None:
    endpoints = ",".join(map(str, etcd.endpoints))
    flags = (f"--endpoint={endpoints}", "--rdzv-backend=etcd")
    _, lines = told(rallyrun, *flags)
    assert lines["endpoint"].startswith("PASS endpoint: ")
    assert lines["endpoint"].count("accepts connections") == len(etcd.endpoints)
    assert "set the job's --rdzv-id" in lines["control-plane"]
    name = rallyrun.mark[:8]
    _, lines = told(rallyrun, *flags, f"--rdzv-id={name}")
    assert f"SKIP control-plane: job '{name}' has no coordinator" in lines["control-plane"]
    of_job = ("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoints}", f"--rdzv-id={name}")
    job = Nodes(rallyrun, *of_job, "--rdzv-conf=lease=30", "--preflight=warn")
    node = job.start("A")
    node.comes_up(1, world_size=1)
    _, lines = told(rallyrun, *flags, f"--rdzv-id={name}")
    assert lines["control-plane"].startswith("PASS control-plane: Rallypoint's control plane answers")
    assert clocks_agree(lines["clock"])
    away = f"--endpoint={etcd.endpoints[0]},127.0.0.1:{free_port()}"
    _, lines = told(rallyrun, away, "--rdzv-backend=etcd", f"--rdzv-id={name}")
    assert "nothing is listening on the port" in lines["endpoint"]
    assert lines["endpoint"].startswith("WARN endpoint: ")
    code, lines = told(rallyrun, f"--endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=etcd")
    assert code == 2
    assert lines["endpoint"].startswith("FAIL endpoint: ")
    job.say("finish")
    all_end([node], 0)


def test_control_planes(at_once: AtOnce) -> None:
    at_once(a_control_plane_outside_answers_for_any_job, the_control_plane_of_a_job_answers_for_that_job)
