"""Jobs of several agents on loopback, each a real process."""

from __future__ import annotations

import os
import re
import socket

import pytest

from tests.jobs.launching import RALLYRUN, AtOnce, Launcher
from tests.jobs.nodes import Node, Nodes, all_end, all_ranks, all_up, c10d, common, root_cause, told_in_short
from tests.ports import free_port

QUICK = "last_call_timeout=1"


def check_two_and_one(a: Node, b: Node) -> None:
    """Two workers of one node and one of the other agree on everything that they must agree on."""
    nodes, sizes = (a, b), (2, 1)
    assert all_ranks(nodes, sizes) == [0, 1, 2]
    assert common(nodes, sizes, "WORLD_SIZE") == "3"
    assert common(nodes, sizes, "GROUP_WORLD_SIZE") == "2"
    assert common(nodes, sizes, "ROLE_WORLD_SIZE") == "3"
    assert common(nodes, sizes, "TORCHELASTIC_RESTART_COUNT") == "0"
    assert common(nodes, sizes, "MASTER_ADDR") == "127.0.0.1"
    common(nodes, sizes, "MASTER_PORT")
    assert [up["LOCAL_RANK"] for up in a.last(2)] == ["0", "1"]
    assert {common((a,), (2,), "GROUP_RANK"), common((b,), (1,), "GROUP_RANK")} == {"0", "1"}
    assert (common((a,), (2,), "LOCAL_WORLD_SIZE"), common((b,), (1,), "LOCAL_WORLD_SIZE")) == ("2", "1")


# Meeting


def test_c10d_with_two_and_one_workers_and_failures_on_either_node(rallyrun: Launcher) -> None:
    """A failure restarts all and counts once; the workers' store is there, and new in each round."""
    job = c10d(rallyrun, "2", "--max-restarts=3")
    a, b = job.start("A", "--nproc-per-node=2"), job.start("B")
    a.comes_up(2)
    b.comes_up(1)
    check_two_and_one(a, b)
    stores = [common((a, b), (2, 1), "MASTER_PORT")]
    for starts, failure in ((2, "fail-B-0"), (3, "fail-A-1")):  # both workers of A fail, which is one failure
        job.say(failure)
        a.comes_up(2, starts=starts)
        b.comes_up(1, starts=starts)
        assert common((a, b), (2, 1), "TORCHELASTIC_RESTART_COUNT") == str(starts - 1)
        assert all_ranks((a, b), (2, 1)) == [0, 1, 2]
        assert common((a, b), (2, 1), "TORCHELASTIC_USE_AGENT_STORE") == "True"
        stores.append(common((a, b), (2, 1), "MASTER_PORT"))
    assert stores[0] != stores[1] != stores[2]
    job.say("finish")
    all_end([a, b], 0)


def test_static_with_two_and_one_workers_that_restart_together(rallyrun: Launcher) -> None:
    port = free_port()
    job = Nodes(rallyrun, "--nnodes=2", "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={port}")
    b = job.start("B", "--node-rank=1")
    a = job.start("A", "--node-rank=0", "--nproc-per-node=2")
    a.comes_up(2)
    b.comes_up(1)
    check_two_and_one(a, b)
    assert a.ranks(2) == [0, 1]
    assert common((a, b), (2, 1), "MASTER_PORT") == str(port)
    job.say("fail-B-0")
    a.comes_up(2, starts=2)
    b.comes_up(1, starts=2)
    assert [a.ranks(2), b.ranks(1)] == [[0, 1], [2]]
    assert common((a, b), (2, 1), "TORCHELASTIC_RESTART_COUNT") == "1"
    job.say("finish")
    all_end([a, b], 0)


def test_the_host_of_the_control_plane_may_come_last(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "3")
    nodes = []
    for name in ("B", "C", "host"):
        nodes.append(job.start(name, f"--rdzv-conf=is_host={name == 'host'}", env={"LOGLEVEL": "INFO"}))
        nodes[-1].job.until_err("Rendezvous'ing worker group")  # so that it really comes in this order
    all_up(nodes)
    assert all_ranks(nodes, [1, 1, 1]) == [0, 1, 2]
    job.say("finish")
    all_end(nodes, 0)


def test_a_job_may_be_without_a_shared_worker_store(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    nodes = job.up()
    assert common(nodes, [1, 1], "TORCHELASTIC_USE_AGENT_STORE") == "False"
    # Nobody listens there: the port is left for the worker of rank 0.
    with socket.create_server(("", int(common(nodes, [1, 1], "MASTER_PORT")))):
        pass
    job.say("finish")
    all_end(nodes, 0)


# Changes of membership


def new_nodes_join_a_running_job(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "1:3", conf=QUICK)
    nodes = [job.start("A")]
    nodes[0].comes_up(1, world_size=1)
    for size, name in ((2, "B"), (3, "C")):
        nodes.append(job.start(name))
        all_up(nodes, world_size=size)
        assert all_ranks(nodes, [1] * size) == list(range(size))
        assert common(nodes, [1] * size, "TORCHELASTIC_RESTART_COUNT") == "0"
        assert nodes[0].ranks(1) == [0], "who was there keeps its rank"
    job.say("finish")
    all_end(nodes, 0)


def test_survivors_of_a_killed_agent_regroup(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2:3")
    host = job.host("host")
    nodes = [host, job.start("B"), job.start("C")]
    all_up(nodes, world_size=3)
    nodes.pop().dies()
    all_up(nodes, starts=2, world_size=2)
    assert all_ranks(nodes, [1, 1]) == [0, 1]
    assert common(nodes, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    job.say("finish")
    all_end(nodes, 0)


def all_who_wait_are_told_at_once_when_the_time_of_one_is_over(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "3")
    a = job.start("A", "--rdzv-conf=join_timeout=10", env={"LOGLEVEL": "INFO"})
    a.job.until_err("control plane listens on port")
    b = job.start("B")  # with the whole default of its own
    all_end([a, b], 1)
    host = socket.gethostname()
    names = f"{host} pid {a.job.pid}, {host} pid {b.job.pid}"
    for node in (a, b):
        assert f"{host} pid {a.job.pid} has waited for 10 s, 2 of 3 nodes had joined ({names}), 1 was" in node.job.err
        assert "the control plane" not in node.job.err.partition("did not complete")[2]
        assert "was lost" not in node.job.err
    assert "giving up in" in a.job.err
    assert "waiting for" not in b.job.err  # the host tells


def a_loss_that_nobody_makes_good_is_told_with_its_time(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", conf="join_timeout=10")  # B may be slow to come
    a, b = job.up(hosted=True)
    b.dies()
    all_end([a], 1)
    lost = rf"pid {b.job.pid} \(rank 1\) was lost at \d\d:\d\d:\d\d and no node has replaced it"
    assert re.search(
        r"round 0 ended: .* was lost \(.*\); the workers are stopped until 1 more node has joined", a.job.err
    )
    assert re.search(rf"waiting for .*: 1 of 2 nodes have joined .*{lost}; giving up in \d+ s", a.job.err)
    assert re.search(rf"error: .*{lost} within 10 s, 1 of 2 nodes had joined .*--nnodes=1:2", a.job.err)


def spares_park_one_takes_a_lost_place_and_one_ends_unneeded(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "1:2", conf="last_call_timeout=30")
    a, b = job.up(hosted=True)
    spares = [job.start(name, env={"LOGLEVEL": "INFO"}) for name in "ST"]  # one of them would tell people
    for spare in spares:
        spare.job.until_err("waits as a spare")
    assert [len(node.ups) for node in (a, b, *spares)] == [1, 1, 0, 0], "a spare disturbs nobody"
    lost = b.ranks(1)
    b.dies()
    a.comes_up(1, starts=2, world_size=2)
    job.say("finish-A")
    a.job.until_err("Waiting for the other agents")  # by now the spare's worker is up, or about to be
    job.say("finish")
    all_end([a, *spares], 0)
    (taken,) = [node for node in spares if node.ups]
    assert taken.ranks(1) == lost
    assert len(taken.ups) == 1


# Failures and ends


def test_unequal_arguments_are_told_to_both_sides_and_those_of_the_first_hold(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2")
    a = job.host("A")
    waits = "import os, time\nwhile not os.path.exists('fail-B'): time.sleep(0.02)\nos._exit(3)\n"
    job.script = rallyrun.script(waits, "other.py")
    b = job.start("B", "--nnodes=3", "--max-restarts=5")
    a.comes_up(1)
    job.say("fail-B")
    all_end([a, b], 1)
    assert len(a.ups) == 1, "the first one's restarts hold: none"
    differences = (
        "--nnodes=3, but the job with --nnodes=2, which applies",
        "--max-restarts=5, but the job with --max-restarts=0, which applies",
        "the program other.py, but the job with the program script.py",
    )
    for difference in differences:
        assert f"this node was started with {difference}; use the same value on all nodes" in b.job.err
        assert f"{socket.gethostname()} pid {b.job.pid} was started with {difference}" in a.job.err


def test_when_the_budget_is_gone_there_is_one_report_and_the_same_first_failure_for_all(rallyrun: Launcher) -> None:
    """The report is given where the failure was and by the coordinator's agent; the others tell the cause in a line."""
    job = c10d(rallyrun, "3", "--max-restarts=1")
    nodes = [job.host("A"), *(job.start(name) for name in "BC")]
    all_up(nodes)
    job.say("fail-A-0")
    all_up(nodes, starts=2)
    job.say("fail-B-1")
    all_end(nodes, 1)
    a, b, c = nodes
    assert root_cause(a) == root_cause(b)
    rank, host = b.ranks(1)[0], socket.gethostname()
    assert f"  rank      : {rank} (local_rank: 0)" in root_cause(a)
    assert any("  exitcode  : 1 (pid: " in line for line in root_cause(a))
    assert (f"host      : {host} (another node)" in a.job.err, f"host      : {host}\n" in b.job.err) == (True, True)
    short = f"rank {rank} failed on {host} (exit code 1): it exited with code 1; the full report is on {host}"
    assert told_in_short(c) == short
    for node in nodes:
        assert "Traceback" not in node.job.err
        assert "restarting the workers (restart 1 of 1)" in node.job.err
    for node in (a, b):
        assert "B fails in 1" in node.job.err
        assert "Restarts used: 1 of 1" in node.job.err


def test_an_early_finisher_waits_for_the_others_and_a_failure_takes_it_back_in(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", "--max-restarts=1", env={"LOGLEVEL": "INFO"})
    a, b = job.up()
    job.say("finish-A")
    a.job.until_err("Waiting for the other agents")
    job.say("fail-B-0")
    for node in (a, b):
        node.comes_up(1, starts=2)  # and A's worker finishes at once, so that A waits again
    a.job.until(lambda _: a.job.err.count("Waiting for the other agents") == 2, "A waits again")
    job.say("finish")
    all_end([a, b], 0)
    assert [len(a.ups), len(b.ups)] == [2, 2]
    assert common((a, b), (1, 1), "TORCHELASTIC_RESTART_COUNT") == "1"


# Who may come in


def two_nodes_of_the_same_rank(rallyrun: Launcher) -> None:
    job = Nodes(rallyrun, "--nnodes=3", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    a, b = job.start("A", "--node-rank=0", env={"LOGLEVEL": "INFO"}), job.start("B", "--node-rank=1")
    a.job.until_err("2 of 3 nodes have joined")
    second = job.start("second", "--node-rank=1")
    assert second.job.ends() == 1
    assert "--node-rank" in second.job.err
    assert "Traceback" not in second.job.err
    c = job.start("C", "--node-rank=2")
    all_up((a, b, c))
    job.say("finish")
    all_end([a, b, c], 0)


# The state in a shared file


def shared_file(rallyrun: Launcher, nnodes: str, *flags: str) -> Nodes:
    """A job whose state is in a file."""
    endpoint = f"--rdzv-endpoint={rallyrun.folder / 'state'}"
    return Nodes(
        rallyrun,
        f"--nnodes={nnodes}",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
        endpoint,
        "--rdzv-conf=store_type=file",
        *flags,
    )


def test_a_job_over_a_shared_file(rallyrun: Launcher) -> None:
    job = shared_file(rallyrun, "2", "--max-restarts=1")
    a, b = job.start("A", "--nproc-per-node=2"), job.start("B")
    a.comes_up(2)
    b.comes_up(1)
    assert all_ranks((a, b), (2, 1)) == [0, 1, 2]
    job.say("fail-B-0")
    a.comes_up(2, starts=2)
    b.comes_up(1, starts=2)
    assert common((a, b), (2, 1), "TORCHELASTIC_RESTART_COUNT") == "1"
    job.say("finish")
    all_end([a, b], 0)
    assert (rallyrun.folder / "state").exists(), "others may still have to read how the job ended"


def test_without_an_endpoint_the_file_is_private_and_goes_with_the_job(rallyrun: Launcher) -> None:
    job = Nodes(rallyrun, "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-conf=store_type=file")
    a = job.start("A")
    a.comes_up(1)
    job.say("finish")
    all_end([a], 0)  # the fixture finds what is left


# What waits


def test_rendezvous_that_wait_for_somebody(at_once: AtOnce) -> None:
    at_once(
        all_who_wait_are_told_at_once_when_the_time_of_one_is_over,
        a_loss_that_nobody_makes_good_is_told_with_its_time,
        two_nodes_of_the_same_rank,
    )


def test_last_calls(at_once: AtOnce) -> None:
    at_once(
        new_nodes_join_a_running_job,
        spares_park_one_takes_a_lost_place_and_one_ends_unneeded,
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one processor is shared by nobody's threads")
def test_agents_that_share_a_machine_are_told_of_its_threads_once(rallyrun: Launcher) -> None:
    unset = ["env", "-u", "OMP_NUM_THREADS", *RALLYRUN]
    flags = ["--nnodes=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job"]
    nodes = [rallyrun.command([*unset, *flags, "--no-python", "true"]) for _ in range(3)]
    assert [node.ends() for node in nodes] == [0, 0, 0]
    assert sum(node.err.count("OMP_NUM_THREADS is not set") for node in nodes) == 1
