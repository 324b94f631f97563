"""What `rallyctl` shows of running jobs, and the effect of its commands."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

from tests.environment import JOBS
from tests.jobs.launching import RALLYCTL, TIMEOUT, AtOnce, Launcher
from tests.jobs.nodes import Node, Nodes, all_end, all_up, c10d, common
from tests.jobs.test_control_plane import outside, serve
from tests.ports import free_port
from tests.processes import below
from tests.waiting import until

SECRET = "k3n-secret-of-this-test-0123456789"


class Operator:
    """Somebody who gives commands for one job."""

    def __init__(self, rallyrun: Launcher, *where: str, env: dict[str, str] | None = None) -> None:
        self._rallyrun = rallyrun
        self._where = where
        self._env = env or {}

    def __call__(self, *words: str) -> tuple[int, str]:
        """Exit code and output of a verb, on whichever stream."""
        job = self._rallyrun.command([*RALLYCTL, *words, *self._where], env=self._env)
        code = job.ends()
        return code, "\n".join(job.out) + job.err

    def status(self, *flags: str) -> tuple[int, dict[str, Any]]:
        """Exit code and JSON of `rallyctl status`; empty if it has said only, on standard error, why there is none."""
        job = self._rallyrun.command([*RALLYCTL, "status", "--json", *flags, *self._where], env=self._env)
        return job.ends(), json.loads("\n".join(job.out) or "{}")


def endpoint_of(node: Node) -> str:
    """Where a node that hosts the control plane does so."""
    return next(each for each in node.job.err.splitlines() if "control plane listens on port" in each).split()[-1]


def listed_job(rallyrun: Launcher, node: Node) -> str:
    """The id of a node's job, among those that `rallyctl status` finds on this machine.

    An agent can be found from a moment after its first worker's start on.
    """
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        _, seen = Operator(rallyrun).status()
        if "nodes" in seen:  # no other job runs here
            return str(seen["job"])
        found = [each["job"] for each in seen.get("jobs", ()) if each["pid"] == node.job.pid]
        if found:
            return str(found[0])
    raise AssertionError(f"no job of process {node.job.pid} was found")


def a_job_is_shown_restarted_resized_drained_and_stopped(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "2")
    ask = Operator(rallyrun, f"127.0.0.1:{port}")
    nodes = job.up()
    code, seen = ask.status()
    assert (code, seen["version"], seen["job"], seen["phase"], seen["round"]) == (0, 1, "job", "running", 0)
    pids = [[int(each["pid"])] for node in nodes for each in node.ups]
    assert sorted(each["workers"]["pids"] for each in seen["nodes"]) == sorted(pids)
    assert [each["global_ranks"] for each in seen["nodes"]] == [[0], [1]]
    assert {each["pid"] for each in seen["nodes"]} == {node.job.pid for node in nodes}

    assert ask("restart")[0] == 0
    for node in nodes:
        node.comes_up(1, starts=2, world_size=2)
        node.job.until_err("restarted round 0")
    assert common(nodes, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0", "no restart is used up"
    assert ask.status()[1]["restarts"]["requested"] == 1

    spare = job.start("C")
    spare.job.until_err("waiting", or_end=True)
    assert ask("resize", "1:3")[0] == 0
    for node, starts in ((nodes[0], 3), (nodes[1], 3), (spare, 1)):
        node.comes_up(1, starts=starts, world_size=3)
        node.job.until_err("resized the job from 2:2 to 1:3 nodes" if node is not spare else "")
    (wanted,) = [each for each in ask.status()[1]["nodes"] if each["pid"] == nodes[1].job.pid]
    assert ask("drain", str(wanted["group_rank"]))[0] == 0
    assert nodes[1].job.ends() == 0, "its workers ended in order and the job goes on"
    assert "is draining this node" in nodes[1].job.err
    for node, starts in ((nodes[0], 4), (spare, 2)):
        node.comes_up(1, starts=starts, world_size=2)

    code, text = ask("drain", "nobody")
    assert code == 1
    assert "no node 'nobody'" in text
    assert "nothing was changed" in text
    assert ask("stop")[0] == 0
    for node in (nodes[0], spare):
        assert node.job.ends() == 1
        assert "stopped the job before its workers finished" in node.job.err
    named = Operator(rallyrun, f"127.0.0.1:{port}", "--rdzv-id=job")
    code, seen = named.status()
    assert (code, seen["phase"], seen["restarts"]["requested"]) == (4, "stopped", 1)
    assert seen["age_seconds"] > 0
    assert not any("took over" in each["text"] for each in seen["events"])
    assert "stopped the job" in seen["events"][-1]["text"]
    code, text = ask("status", "--all")
    assert (code, "job  stopped" in text) == (0, True)
    code, text = named("stop")
    assert (code, "the job has already stopped; nothing was changed" in text) == (1, True)
    code, text = ask("restart")
    assert (code, "no job is running" in text) == (1, True)
    code, text = ask("bundle")
    assert (code, "no job is running" in text) == (1, True)
    listed = ask.status()[1]
    assert (listed["jobs"], [(each["job"], each["phase"]) for each in listed["ended"]]) == ([], [("job", "stopped")])
    assert "refused" not in server.err, "a list of jobs is an answer"
    server.signal(signal.SIGTERM)
    assert server.ends() == 0


def jobs_of_one_machine_are_found_without_an_endpoint(rallyrun: Launcher) -> None:
    first = Nodes(rallyrun, "--standalone", "--nproc-per-node=2")
    node = first.start("A")
    node.comes_up(2)
    job = listed_job(rallyrun, node)
    mine = Operator(rallyrun, f"--rdzv-id={job}")
    code, seen = mine.status()
    assert (code, seen["phase"]) == (0, "running")
    assert seen["nodes"][0]["workers"]["pids"] == [int(each["pid"]) for each in node.last(2)]
    code, text = Operator(rallyrun, job[:8])("restart")
    assert (code, f"rallyctl: restarting job {job}: running, 1 node" in text) == (0, True), text
    node.comes_up(2, starts=2)
    first.say("finish")
    assert node.job.ends() == 0
    for where in ([f"--rdzv-id={job}"], [job], [str(node.job.pid)]):
        code, text = Operator(rallyrun, *where)("status")
        assert (code, "succeeded" in text) == (5, True), text
    code, text = mine("stop")
    assert (code, "the last one succeeded" in text) == (1, True), text
    code, seen = Operator(rallyrun).status("--all")
    (ended,) = seen["ended"]
    assert (code, ended["job"], ended["pid"], ended["outcome"], ended["round"]) == (
        0,
        job,
        node.job.pid,
        "succeeded",
        1,
    )


def how_a_job_has_ended_is_known_on_its_machine(rallyrun: Launcher) -> None:
    port = free_port()
    where = f"localhost:{port}"
    flags = ["--rdzv-backend=c10d", "--rdzv-id=ended", f"--rdzv-endpoint={where}", "--max-restarts=1"]
    program = rallyrun.script("raise ValueError('boom')", "boom.py")
    job = rallyrun(*flags, "--log-dir=logs", "--redirects=3", program)
    assert job.ends() == 1
    for name in (where, f"127.0.0.1:{port}", "ended", "boom.py"):
        code, seen = Operator(rallyrun, name).status()
        (ended,) = seen["ended"]
        assert (code, ended["pid"], ended["outcome"], ended["restarts"], ended["max_restarts"]) == (
            *(4, job.pid, "failed", 1, 1),
        )
        assert ended["detail"].endswith("(exit code 1): ValueError: boom")
        assert os.path.isdir(ended["log_dir"])


def two_jobs_of_one_id_are_told_apart_by_their_endpoints(rallyrun: Launcher) -> None:
    flags = ["--rdzv-backend=c10d", "--rdzv-id=twins", "--nnodes=1"]
    ports = [free_port(), free_port(), free_port()]
    nodes = []
    for port in ports:
        jobs = Nodes(rallyrun, *flags, f"--rdzv-endpoint=127.0.0.1:{port}")
        nodes.append(jobs.start(f"of {port}"))
        nodes[-1].comes_up(1)
    # An agent is found a moment after its workers' start.
    while len([each for each in Operator(rallyrun).status()[1].get("jobs", ()) if each["job"] == "twins"]) < 3:
        assert all(each.job.pid in below(os.getpid()) for each in nodes)
    for verb in (["stop"], ["restart"], ["resize", "1:1"], ["stacks"], ["status"], ["bundle"]):
        code, text = Operator(rallyrun, "--rdzv-id=twins")(*verb)
        assert code == 2, (verb, text)
        rows = {tuple(line.split()[:4]) for line in text.splitlines()}
        for port, node in zip(ports, nodes, strict=True):
            assert (str(node.job.pid), "twins", "script.py", f"127.0.0.1:{port}") in rows, text
    for node, name in ((nodes[1], f"127.0.0.1:{ports[1]}"), (nodes[2], str(nodes[2].job.pid))):
        code, text = Operator(rallyrun, name)("stop")
        assert (code, "stopping job twins: running, 1 node" in text) == (0, True), text
        node.job.ends()
    assert Operator(rallyrun, "twins")("stop")[0] == 0, "the other one is still running, and is the only one"
    nodes[0].job.ends()


def a_static_job_is_shown_restarted_and_keeps_its_size(rallyrun: Launcher) -> None:
    port = free_port()
    static = Nodes(rallyrun, "--nnodes=2", "--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{port}")
    nodes = [static.start(name, f"--node-rank={rank}") for rank, name in enumerate("AB")]
    all_up(nodes, world_size=2)
    ask = Operator(rallyrun, f"127.0.0.1:{port}", "--rdzv-backend=static")
    code, seen = ask.status()
    assert (code, seen["phase"], [each["group_rank"] for each in seen["nodes"]]) == (0, "running", [0, 1])
    assert [each["pid"] for each in seen["nodes"]] == [node.job.pid for node in nodes]
    code, text = ask("resize", "1:2")
    assert (code, "a static job has fixed ranks" in text) == (1, True)
    code, text = ask("drain", "0")
    assert (code, "hosts this job's control plane" in text) == (1, True)
    assert ask("restart")[0] == 0
    all_up(nodes, starts=2, world_size=2)
    static.say("finish")
    all_end(nodes, 0)


def a_job_with_a_secret_is_shown_to_those_who_have_it(rallyrun: Launcher) -> None:
    secret = {"RALLYPOINT_SECRET": SECRET}
    job = c10d(rallyrun, "2", env=secret)
    host = job.host("A")
    other = job.start("B")
    all_up((host, other), world_size=2)
    where = f"127.0.0.1:{endpoint_of(host)}"
    code, text = Operator(rallyrun, where)("stop")
    assert code == 1
    assert "this job has a secret" in text
    assert Operator(rallyrun, where, "--rdzv-id=job", env={"RALLYPOINT_SECRET": SECRET[::-1]})("status")[0] == 1
    code, seen = Operator(rallyrun, where, "--rdzv-id=job", env=secret).status()
    assert (code, len(seen["nodes"])) == (0, 2)
    code, seen = Operator(rallyrun, str(other.job.pid)).status()
    assert (code, len(seen["nodes"])) == (0, 2), "on its machine, an agent of this user gives the job's token"
    job.say("finish")
    all_end([host, other], 0)


STACKS = """
import os, sys, time
def load_batch():
    os.write(1, b"up\\n"), time.sleep(600)  # on one line, so that it is the one that is shown
def all_reduce():
    os.write(1, b"up\\n"), time.sleep(600)
load_batch() if os.environ["RANK"] == "2" else all_reduce()
"""


def stacks_of_running_workers_are_grouped(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--nproc-per-node=3", rallyrun.script(STACKS, "stuck.py"))
    job.until(lambda lines: lines.count("up") == 3, "three workers are where they stay")
    ask = Operator(rallyrun, f"--rdzv-id={listed_job(rallyrun, Node('A', job))}")
    code, text = ask("stacks")
    assert code == 0, text
    alike, odd = "2 ranks (0-1): all_reduce, stuck.py:6", "1 rank (2): load_batch, stuck.py:4  <- differs"
    assert text.splitlines()[:4] == [alike, odd, "", alike]
    alike, odd = text.split(f"\n\n{odd}\n")
    assert "all_reduce (stuck.py:6)" in alike
    assert "load_batch (stuck.py:4)" in odd
    assert "all_reduce" not in odd
    code, text = ask("stacks", "--rank=1")
    assert code == 0
    assert text.startswith("1 rank (1): all_reduce, stuck.py:6\n")
    code, text = ask("stacks", "--rank=7")
    assert code == 1
    assert "the job has no rank 7" in text
    assert ask("stop")[0] == 0
    assert job.ends() == 1


def what_is_no_control_plane_is_named(rallyrun: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:
        web.settimeout(60)
        port = web.getsockname()[1]
        asking = rallyrun.command([*RALLYCTL, "status", f"127.0.0.1:{port}"])
        connected, _ = web.accept()
        with connected:
            connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert asking.ends() == 1
    assert "is not Rallypoint's control plane" in asking.err
    code, text = Operator(rallyrun, f"127.0.0.1:{free_port()}")("status")
    assert code == 1
    assert "no control plane answers" in text
    assert "Traceback" not in text


def _open_when_idle(pid: int) -> set[int]:
    """The descriptors that a process has open while it sleeps: one that imports has files open for a moment."""
    seen: list[tuple[str, list[str], set[int]]] = [("", [], set())]

    def is_idle() -> bool:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        seen.append((state, fields[10:12], set(map(int, os.listdir(f"/proc/{pid}/fd")))))
        return state == "S" and seen[-1] == seen[-2]

    until(is_idle, "it sleeps")
    return seen[-1][2]


def a_job_without_a_free_descriptor_goes_on_whoever_asks(rallyrun: Launcher) -> None:
    """The server for commands needs some, once somebody has connected."""
    script = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('finish'): time.sleep(0.02)\n"
    job = rallyrun("--standalone", rallyrun.script(script))
    job.until(lambda lines: "up" in lines, "the worker is up")
    folder = Path(rallyrun.environment()[JOBS]) / f"rallypoint-{os.geteuid()}"
    until(lambda: list(folder.glob(f"running-{job.pid}-*[0-9a-f]")), "commands find it")
    (file,) = folder.glob(f"running-{job.pid}-*")
    port = int(re.findall(r"(?m)^endpoint: .*:(\d+)$", file.read_text())[0])
    used = _open_when_idle(job.pid)
    _, hard = resource.prlimit(job.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(job.pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))
    with socket.create_connection(("127.0.0.1", port)):
        job.until_err("commands on this machine cannot find this job, but the job continues")
    resource.prlimit(job.pid, resource.RLIMIT_NOFILE, (hard, hard))
    (rallyrun.folder / "finish").touch()
    assert job.ends() == 0, job.err


def test_jobs_are_watched_and_steered(at_once: AtOnce) -> None:
    at_once(
        a_job_is_shown_restarted_resized_drained_and_stopped,
        jobs_of_one_machine_are_found_without_an_endpoint,
        how_a_job_has_ended_is_known_on_its_machine,
        two_jobs_of_one_id_are_told_apart_by_their_endpoints,
        a_static_job_is_shown_restarted_and_keeps_its_size,
        a_job_with_a_secret_is_shown_to_those_who_have_it,
        stacks_of_running_workers_are_grouped,
        what_is_no_control_plane_is_named,
        a_job_without_a_free_descriptor_goes_on_whoever_asks,
    )
