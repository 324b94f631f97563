"""The control plane is lost while a job runs, and comes back or stays away."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

from rallypoint.base.endpoint import resolve
from tests.jobs.launching import RALLYCTL, RALLYRUN, AtOnce, Job, Launcher
from tests.jobs.nodes import Node, Nodes, all_end, all_ranks, all_up, c10d, common
from tests.ports import free_port


def serve(rallyrun: Launcher, port: int) -> Job:
    server = rallyrun.command([*RALLYCTL, "serve", "--endpoint", f"127.0.0.1:{port}"])
    server.until_err("control plane listens at")
    return server


def outside(rallyrun: Launcher, port: int, nnodes: str, *flags: str, conf: str = "") -> Nodes:
    """A job whose control plane is none of its nodes."""
    endpoint = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
    return Nodes(rallyrun, f"--nnodes={nnodes}", *endpoint, f"--rdzv-conf=is_host=false{conf}", *flags)


def running_workers_run_on_and_the_job_finishes_on_a_new_server(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "2")
    nodes = job.up()
    server.signal(signal.SIGKILL)
    for node in nodes:
        node.job.until_err("was lost")
    server = serve(rallyrun, port)
    for node in nodes:
        node.job.until_err("is reachable again")
    job.say("finish")
    all_end(nodes, 0)
    assert [len(node.ups) for node in nodes] == [1, 1], "the same workers all the time"
    server.signal(signal.SIGTERM)
    assert server.ends() == 0


def a_failure_while_the_server_is_away_is_counted_once_when_it_is_back(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "2", "--max-restarts=1")
    nodes = job.up()
    server.signal(signal.SIGKILL)
    for node in nodes:
        node.job.until_err("was lost")
    job.say("fail-A-0")
    nodes[0].job.until_err("failed (exitcode: 1)")
    serve(rallyrun, port)
    all_up(nodes, starts=2, world_size=2)
    assert common(nodes, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "1"
    job.say("fail-B-1")
    all_end(nodes, 1)


def a_server_outside_tells_how_far_the_rendezvous_is_and_one_of_the_nodes(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "3", conf=",join_timeout=12")  # A is told of after 2 s, and B may be slow to come
    a = job.start("A")
    server.until_err("1 of 3 nodes have joined")
    b = job.start("B")
    all_end([a, b], 1)
    assert server.err.count("did not complete: ") == 1
    assert "1 of 3 nodes have joined" in a.job.err
    assert "waiting for" not in b.job.err
    assert "2 of 3 nodes had joined" in b.job.err
    server.signal(signal.SIGTERM)
    assert server.ends() == 0


def a_server_that_stays_away_ends_the_job_when_it_is_needed(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "2", "--max-restarts=1", conf=",join_timeout=8")
    nodes = job.up()
    server.signal(signal.SIGKILL)
    for node in nodes:
        node.job.until_err("was lost")
    job.say("fail-A-0")
    assert nodes[0].job.ends() == 1
    assert "did not come back within 8 s" in nodes[0].job.err
    assert nodes[1].job.until(lambda lines: len(lines) == 1, "B runs on") is not None
    job.say("finish")
    assert nodes[1].job.ends() == 0
    assert "all workers on this node had succeeded" in nodes[1].job.err


def test_servers_outside_the_job_that_come_go_and_stay_away(at_once: AtOnce) -> None:
    at_once(
        a_server_that_stays_away_ends_the_job_when_it_is_needed,
        a_server_outside_tells_how_far_the_rendezvous_is_and_one_of_the_nodes,
        running_workers_run_on_and_the_job_finishes_on_a_new_server,
        a_failure_while_the_server_is_away_is_counted_once_when_it_is_back,
    )


def test_an_agent_of_the_same_machine_takes_the_control_plane_over(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2:3")
    host = job.host("host")
    nodes = [job.start("B"), job.start("C")]
    all_up((host, *nodes), world_size=3)
    host.dies()
    all_up(nodes, starts=2, world_size=2)
    assert common(nodes, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    back = job.start("D")
    nodes.append(back)
    for node in nodes:
        node.comes_up(1, starts=1 if node is back else 3, world_size=3)
    assert all_ranks(nodes, [1, 1, 1]) == [0, 1, 2]
    job.say("finish")
    all_end(nodes, 0)


INFO = {"LOGLEVEL": "INFO"}


def finished_host(job: Nodes, host: Node, other: Node, number: signal.Signals) -> None:
    """The node that hosts the control plane has done its part, and is stopped; the other still works, and finishes."""
    all_up((host, other), world_size=2)
    job.say("finish-A")
    other.job.until_err("nodes that succeeded in round 0: 0")
    host.job.signal(number)
    host.job.ends()
    other.job.until_err("the workers keep running")
    job.say("finish-B")
    all_end([other], 0)
    assert len(other.ups) == 1, "its workers were not started again"
    assert "round 0 ended" not in other.job.err


def a_finished_host(nnodes: str, number: signal.Signals) -> Callable[[Launcher], None]:
    def scenario(rallyrun: Launcher) -> None:
        job = c10d(rallyrun, nnodes)
        finished_host(job, job.host("A"), job.start("B", env=INFO), number)

    scenario.__name__ = f"a finished host of {nnodes} gets {number.name}"
    return scenario


def a_finished_host_of_a_static_job(rallyrun: Launcher) -> None:
    job = Nodes(rallyrun, "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    first = job.start("A", "--node-rank=0")
    finished_host(job, first, job.start("B", "--node-rank=1", env=INFO), signal.SIGKILL)


def test_a_node_that_has_finished_takes_nobody_along(at_once: AtOnce) -> None:
    at_once(
        a_finished_host("2", signal.SIGKILL),
        a_finished_host("2", signal.SIGTERM),
        a_finished_host("1:2", signal.SIGKILL),
        a_finished_host("1:2", signal.SIGTERM),
        a_finished_host_of_a_static_job,
    )


def test_a_control_plane_outside_the_job_finds_its_port_free_when_it_is_started_again(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    # Both find that the endpoint is their machine; the first job's agent would have taken the port.
    job = Nodes(rallyrun, "--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
    node = job.start("A")
    node.comes_up(1)
    server.signal(signal.SIGTERM)
    assert server.ends() == 0
    node.job.until_err("was lost")
    serve(rallyrun, port)
    node.job.until_err("is reachable again")
    assert "this agent now hosts the control plane" not in node.job.err
    other = outside(rallyrun, port, "1").start("B", "--rdzv-id=other")
    other.comes_up(1)
    job.say("finish")
    all_end([node, other], 0)


def a_job_id_serves_again_as_soon_as_its_job_has_ended(rallyrun: Launcher) -> None:
    port = free_port()
    serve(rallyrun, port)
    job = outside(rallyrun, port, "1", "--max-restarts=0")
    job.say("fail-A-0")
    for _ in range(2):
        assert job.start("A").job.ends() == 1
    killed = outside(rallyrun, port, "2").start("B")
    killed.job.until_err("nodes have joined")
    killed.dies()
    job.say("finish")
    assert job.start("C").job.ends() == 0, "a job of two nodes that was killed leaves nothing to one of one"


def a_node_that_was_cut_off_when_its_job_ended_does_not_run_it_again(rallyrun: Launcher) -> None:
    port = free_port()
    serve(rallyrun, port)
    job = outside(rallyrun, port, "1:2", conf=",last_call_timeout=1,lease=3")
    nodes = job.up()
    nodes[1].job.signal(signal.SIGSTOP)
    starts = len(nodes[1].ups)  # more than one if it was once silent for longer than its lease
    nodes[0].comes_up(1, starts=2, world_size=1)
    job.say("finish-A")
    assert nodes[0].job.ends() == 0
    again = job.start("C")
    again.comes_up(1, world_size=1)
    nodes[1].job.signal(signal.SIGCONT)
    assert nodes[1].job.ends() == 0, nodes[1].job.err
    assert len(nodes[1].ups) == starts, "its workers were not started again"
    job.say("finish")
    all_end([again], 0)


def test_what_a_job_that_has_ended_leaves_on_its_server(at_once: AtOnce) -> None:
    at_once(
        a_job_id_serves_again_as_soon_as_its_job_has_ended,
        a_node_that_was_cut_off_when_its_job_ended_does_not_run_it_again,
    )


LIMITS = """
import os, resource
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


def test_a_server_takes_more_nodes_than_the_soft_limit_of_files_and_workers_keep_that_limit(
    rallyrun: Launcher,
) -> None:
    script = rallyrun.script(LIMITS, "limits.py")
    limited = ["bash", "-c", 'ulimit -Sn 512; exec "$@"', "-"]
    port = free_port()
    server = rallyrun.command([*limited, *RALLYCTL, "serve", "--endpoint", f"127.0.0.1:{port}"])
    server.until_err("control plane listens at")
    assert soft_limit(server.pid) > 512
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    host = ["--nnodes=1:600", "--rdzv-backend=c10d", "--rdzv-id=big", endpoint, "--rdzv-conf=last_call_timeout=1"]
    agent = rallyrun.command([*limited, *RALLYRUN, *host, script], {"LOGLEVEL": "INFO"})
    agent.until_err("control plane listens on port")
    assert soft_limit(agent.pid) > 512
    assert agent.ends() == 0
    assert agent.out == ["512"]


def soft_limit(pid: int) -> int:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(int(line.split()[3]) for line in lines if line.startswith("Max open files"))


def test_a_server_listens_at_all_addresses_of_its_name(rallyrun: Launcher) -> None:
    addresses = resolve("localhost")
    server = rallyrun.command([*RALLYCTL, "serve", "--endpoint", "localhost:0"])
    server.until_err("control plane listens at localhost:")
    port = int(server.err.rpartition(":")[2])
    for address in addresses:
        with socket.create_connection((address, port), timeout=10):
            pass
    assert addresses


def test_node_0_of_a_static_job_is_started_again(rallyrun: Launcher) -> None:
    job = Nodes(rallyrun, "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    first, other = job.start("A", "--node-rank=0"), job.start("B", "--node-rank=1")
    all_up((first, other), world_size=2)
    first.dies()
    other.job.until_err("was lost")
    nodes = [job.start("C", "--node-rank=0"), other]
    nodes[0].comes_up(1, world_size=2)
    nodes[1].comes_up(1, starts=2, world_size=2)
    assert all_ranks(nodes, [1, 1]) == [0, 1]
    job.say("finish")
    all_end(nodes, 0)


def another_program(rallyrun: Launcher) -> None:
    """It would be a spare of the first, never run, and exit with 0."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    waits = rallyrun.script("import time\nprint('up', flush=True)\ntime.sleep(300)", "first.py")
    first = rallyrun("--nnodes=1:2", "--rdzv-backend=c10d", endpoint, waits)
    first.until(lambda lines: "up" in lines, "it runs")
    for flags, script in ((("--nnodes=1:2",), rallyrun.script("", "second.py")), (("--nnodes=1:3",), waits)):
        second = rallyrun(*flags, "--rdzv-backend=c10d", endpoint, script)
        assert second.ends() == 1
        assert "another job with the default id 'none' is running at this endpoint (since " in second.err
        assert " s: first.py); set a different --rdzv-id for each job" in second.err
        assert "Traceback" not in second.err


def the_same_program_twice(rallyrun: Launcher) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    script = rallyrun.script("import time\nprint('up', flush=True)\ntime.sleep(300)")
    first = rallyrun("--nnodes=1", "--rdzv-backend=c10d", endpoint, script)
    first.until(lambda lines: "up" in lines, "it runs")
    second = rallyrun("--nnodes=1", "--rdzv-backend=c10d", endpoint, script)
    assert second.ends() == 1
    assert "another job with the default id 'none' is running at this endpoint" in second.err


def test_a_second_job_with_the_default_id_is_refused(at_once: AtOnce) -> None:
    at_once(another_program, the_same_program_twice)


def test_a_spare_that_was_not_needed_ends_as_the_job_did(at_once: AtOnce) -> None:
    def ends(what: str, code: int) -> Callable[[Launcher], None]:
        def scenario(rallyrun: Launcher) -> None:
            job = c10d(rallyrun, "2", "--max-restarts=0")
            nodes = job.up("AB", hosted=True)
            spare = job.start("C")
            spare.job.until_err("this node waits as a spare")
            job.say(what)
            assert spare.job.ends() == code
            assert f"the job has {'failed' if code else 'succeeded'}; this spare was not needed" in spare.job.err
            all_end(nodes, code)

        scenario.__name__ = what
        return scenario

    at_once(ends("fail-B-0", 1), ends("finish", 0))


def test_two_hosts_of_one_job_on_a_machine(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", conf="is_host=true")
    job.host("A")
    second = job.start("B")
    assert second.job.ends() == 1
    assert "if another agent of this job already hosts it here, set is_host=false on this one" in second.job.err


def test_mistakes_are_one_sentence(rallyrun: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for endpoint, told, code in (
            (f"127.0.0.1:{port}", f"cannot listen at 127.0.0.1:{port}", 1),
            ("192.0.2.1:0", "cannot listen at 192.0.2.1:0", 1),
            ("host:port", "use a number from 0 to 65535", 2),
        ):
            server = rallyrun.command([*RALLYCTL, "serve", "--endpoint", endpoint])
            assert server.ends() == code
            assert told in server.err
            assert "Traceback" not in server.err
    assert rallyrun.command(RALLYCTL).ends() == 2
