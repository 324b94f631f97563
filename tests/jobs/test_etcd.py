"""Jobs whose control plane is a real etcd of three members."""

from __future__ import annotations

import itertools
import shutil
import signal
import threading
from contextlib import closing
from functools import partial

import pytest

from rallypoint.control.etcd.api import EtcdRefused
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import COMMITS_AS_USUAL, EtcdCluster, running
from tests.jobs.launching import RALLYCTL, AtOnce, Launcher
from tests.jobs.nodes import Node, Nodes, all_end, all_ranks, all_up, common, root_cause, told_in_short
from tests.jobs.test_steering import Operator

LEASE = 6
"""Seconds, where they have to pass; longer than a busy machine leaves an agent without processor time."""
NO_LOSS = 30
"""The same where no node is to be lost by them."""
PREFIX = "/tests/of/rallypoint"


def job(
    rallyrun: Launcher,
    etcd: EtcdCluster,
    nnodes: str,
    *flags: str,
    lease: int = LEASE,
    last_call: int = 60,
    name: str | None = None,
) -> Nodes:
    """A job whose first round waits for all nodes that it may have, also for those that a busy machine starts late."""
    endpoints = ",".join(str(each) for each in etcd.endpoints)
    name = rallyrun.mark[:8] if name is None else name
    return Nodes(
        rallyrun,
        f"--nnodes={nnodes}",
        "--rdzv-backend=etcd",
        f"--rdzv-id={name}",
        f"--rdzv-endpoint={endpoints}",
        f"--rdzv-conf=lease={lease},last_call_timeout={last_call},prefix={PREFIX}",
        *flags,
        env={"LOGLEVEL": "INFO"},
    )


def kept(rallyrun: Launcher, etcd: EtcdCluster) -> list[str]:
    """The keys of the job of this test."""
    found = etcd.ctl("get", "--prefix", f"{PREFIX}/{rallyrun.mark[:8]}/", "--keys-only")
    return [line for line in found.splitlines() if line]


def coordinators(nodes: list[Node]) -> list[Node]:
    """Those who say that they have been the coordinator."""
    return [node for node in nodes if "this agent is the coordinator" in node.job.err]


def started(nodes: Nodes, names: str) -> tuple[list[Node], Node, list[Node]]:
    """Nodes with one worker each, up in one world; the coordinator among them, and the others."""
    made = [nodes.start(name) for name in names]
    all_up(made, world_size=len(names))
    (coordinator,) = coordinators(made)
    return made, coordinator, [node for node in made if node is not coordinator]


def forms_restarts_scales_and_finishes_and_nothing_is_left(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    nodes = job(rallyrun, etcd, "2:3", "--max-restarts=1", lease=NO_LOSS, last_call=2)
    two, _, _ = started(nodes, "AB")
    nodes.say("fail-A-0")
    all_up(two, starts=2, world_size=2)
    assert common(two, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "1"
    third = nodes.start("C")
    three = [*two, third]
    third.comes_up(1, world_size=3)
    all_up(two, starts=3, world_size=3)
    assert all_ranks(three, [1, 1, 1]) == [0, 1, 2]
    nodes.say("finish")
    all_end(three, 0)
    assert kept(rallyrun, etcd) == []


def test_a_job_that_fails_is_reported_by_two_and_leaves_nothing(rallyrun: Launcher, etcd: EtcdCluster) -> None:
    """By the agent of the node where the failure was, and by the elected one."""
    nodes = job(rallyrun, etcd, "3", lease=NO_LOSS)
    three, elected, (failing, other) = started(nodes, "ABC")
    nodes.say(f"fail-{failing.name}-0")
    all_end(three, 1)
    assert root_cause(elected) == root_cause(failing)
    assert all(f"{failing.name} fails in 0" in node.job.err for node in (elected, failing))
    if "Root Cause" in other.job.err:  # the elected one had ended before it, so that it was the coordinator in the end
        assert coordinators([other])
        assert root_cause(other) == root_cause(failing)
    else:
        assert told_in_short(other).startswith(f"rank {failing.ranks(1)[0]} failed on ")
    assert kept(rallyrun, etcd) == []


def test_when_the_coordinator_s_agent_is_killed_the_next_takes_over_at_once(
    rallyrun: Launcher, etcd: EtcdCluster
) -> None:
    nodes = job(rallyrun, etcd, "2:3", lease=NO_LOSS)
    _, coordinator, others = started(nodes, "ABC")
    where = [f"--rdzv-id={rallyrun.mark[:8]}", "--rdzv-backend=etcd", f"--rdzv-conf=prefix={PREFIX}"]
    where.append(f"--rdzv-endpoint={','.join(map(str, etcd.endpoints))}")
    ask = Operator(rallyrun, *where)
    code, seen = ask.status()
    assert (code, len(seen["nodes"])) == (0, 3)
    watching = rallyrun.command([*RALLYCTL, "status", "--watch", *where])
    watching.until(lambda out: any("running" in each for each in out), "that it runs")
    assert ask("resize", "1:4")[0] == 0
    coordinator.dies()
    all_up(others, starts=2, world_size=2)
    code, seen = ask.status()
    assert (code, len(seen["nodes"]), seen["min_nodes"], seen["max_nodes"]) == (0, 2, 1, 4), "what was kept holds"
    watching.until(lambda out: any("reachable again" in each for each in out), "that another is coordinator")
    assert common(others, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    assert len(coordinators(others)) == 1
    nodes.say("finish")
    all_end(others, 0)
    assert (watching.ends(), ask("status")[0]) == (5, 1)
    assert not [key for key in kept(rallyrun, etcd) if "/nodes/" not in key]


def a_coordinator_that_is_paused_is_deposed_and_writes_nothing(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    nodes = job(rallyrun, etcd, "2:3")
    _, coordinator, others = started(nodes, "ABC")
    coordinator.job.signal(signal.SIGSTOP)
    try:
        all_up(others, starts=2, world_size=2)
    finally:
        coordinator.job.signal(signal.SIGCONT)
    everybody = [coordinator, *others]
    coordinator.comes_up(1, starts=2, world_size=3)
    all_up(others, starts=3, world_size=3)
    assert all_ranks(everybody, [1, 1, 1]) == [0, 1, 2]
    nodes.say("finish")
    all_end(everybody, 0)
    assert kept(rallyrun, etcd) == []


def the_coordinator_leaves_in_order_and_the_others_go_on(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    nodes = job(rallyrun, etcd, "1:3")
    _, coordinator, others = started(nodes, "ABC")
    coordinator.job.signal(signal.SIGTERM)
    assert coordinator.job.ends() == 0
    all_up(others, starts=2, world_size=2)
    starts = [len(node.ups) for node in others]  # one more if the other came late
    threading.Event().wait(LEASE)
    nodes.say("finish")
    all_end(others, 0)
    assert [len(node.ups) for node in others] == starts
    assert kept(rallyrun, etcd) == []


def the_coordinator_of_a_preempted_job_is_killed_and_the_job_ends_when_all_have_had_their_time(
    rallyrun: Launcher, *, etcd: EtcdCluster
) -> None:
    options = f"--rdzv-conf=lease={LEASE},last_call_timeout=2,prefix={PREFIX},notice_timeout=8"
    nodes = job(rallyrun, etcd, "3", options, "--preempt-signals=SIGUSR2")
    made, coordinator, others = started(nodes, "ABC")
    others[0].job.signal(signal.SIGUSR2)
    for node in made:
        node.job.until_err("the job is being preempted; the workers have 8 s to save and acknowledge")
    coordinator.dies()
    all_end(others, 143)
    for node in others:
        assert "the end of the preempted job was not announced in time" not in node.job.err, "the next one knows of it"
        assert "received SIGUSR2; not all workers of this node have saved" in node.job.err


def test_jobs_that_an_etcd_coordinates_beside_one_another(at_once: AtOnce, etcd: EtcdCluster) -> None:
    at_once(
        partial(forms_restarts_scales_and_finishes_and_nothing_is_left, etcd=etcd),
        partial(a_coordinator_that_is_paused_is_deposed_and_writes_nothing, etcd=etcd),
        partial(the_coordinator_leaves_in_order_and_the_others_go_on, etcd=etcd),
        partial(the_coordinator_of_a_preempted_job_is_killed_and_the_job_ends_when_all_have_had_their_time, etcd=etcd),
    )


def test_the_leader_of_etcd_is_killed_while_workers_run_and_while_a_rendezvous_waits(
    rallyrun: Launcher, etcd: EtcdCluster
) -> None:
    nodes = job(rallyrun, etcd, "2", "--max-restarts=1", lease=NO_LOSS)
    two, _, _ = started(nodes, "AB")
    waiting = job(rallyrun, etcd, "2", lease=NO_LOSS, name=f"waiting-{rallyrun.mark[:8]}")
    first = waiting.start("C")
    first.job.until_err("this agent is the coordinator")
    etcd.leader().kill()
    second = waiting.start("D")
    nodes.say("fail-B-0")
    all_up(two, starts=2, world_size=2)
    all_up((first, second), world_size=2)
    nodes.say("finish")
    all_end([*two, first, second], 0)
    assert [len(node.ups) for node in two] == [2, 2]


def all_of_etcd_is_away_for_longer_than_a_lease_and_no_worker_notices(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    nodes = job(rallyrun, etcd, "2:3", "--max-restarts=1")
    three, _, _ = started(nodes, "ABC")
    for member in etcd.members:
        member.pause()
    nodes.say("fail-B-0")  # nobody can be told of it, and nobody does anything rash
    three[1].job.until_err("notifying the other agents")
    threading.Event().wait(2 * LEASE)
    assert [len(node.ups) for node in three] == [1, 1, 1]
    for member in etcd.members:
        member.resume()
    all_up(three, starts=2, world_size=3)
    assert common(three, [1, 1, 1], "TORCHELASTIC_RESTART_COUNT") == "1"
    nodes.say("finish")
    all_end(three, 0)
    assert [len(node.ups) for node in three] == [2, 2, 2]


def an_etcd_without_space_costs_nothing_that_it_holds_of_the_job(rallyrun: Launcher) -> None:
    """It refuses every write, so that no agent can be the coordinator; with space, they go on where they were."""
    with running(rallyrun.folder / "own", 1, arguments=["--quota-backend-bytes=4000000", COMMITS_AS_USUAL]) as etcd:
        nodes = job(rallyrun, etcd, "2", "--max-restarts=1")
        two, _, _ = started(nodes, "AB")
        fill(etcd)
        nodes.say("fail-B-0")
        for node in two:
            node.job.until_err("database space exceeded")
        threading.Event().wait(2 * LEASE)
        assert any(key.endswith("/state") for key in kept(rallyrun, etcd))
        make_space(etcd)
        all_up(two, starts=2, world_size=2)
        assert common(two, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "1"
        nodes.say("finish")
        all_end(two, 0)
        assert kept(rallyrun, etcd) == []


def an_etcd_that_has_forgotten_everything_is_told_anew_and_no_worker_notices(rallyrun: Launcher) -> None:
    """It was set up again in the same place, and counts its revisions from the beginning."""
    with running(rallyrun.folder / "own", 1) as etcd:
        nodes = job(rallyrun, etcd, "2", "--max-restarts=1")
        with closing(EtcdClient(etcd.endpoints)) as client:
            for _ in range(100):
                client.put(b"/filler", b"")
        two, _, _ = started(nodes, "AB")
        (member,) = etcd.members
        member.kill()
        shutil.rmtree(rallyrun.folder / "own" / "etcd-0" / member.name)
        member.start()
        member.wait_ready()
        for node in two:
            node.job.until_err("and lost data")
        threading.Event().wait(2 * LEASE)
        assert [len(node.ups) for node in two] == [1, 1]
        nodes.say("fail-B-0")
        all_up(two, starts=2, world_size=2)
        assert common(two, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "1"
        nodes.say("finish")
        all_end(two, 0)
        assert kept(rallyrun, etcd) == []


def test_an_etcd_that_is_away_or_full_or_has_forgotten_everything(at_once: AtOnce, etcd: EtcdCluster) -> None:
    at_once(
        partial(all_of_etcd_is_away_for_longer_than_a_lease_and_no_worker_notices, etcd=etcd),
        an_etcd_without_space_costs_nothing_that_it_holds_of_the_job,
        an_etcd_that_has_forgotten_everything_is_told_anew_and_no_worker_notices,
    )


def fill(etcd: EtcdCluster) -> None:
    """Write until etcd has no space any more."""
    with closing(EtcdClient(etcd.endpoints)) as client:
        writes = (client.put(b"/filler", bytes(500_000)) for _ in itertools.count())
        with pytest.raises(EtcdRefused, match="space exceeded"):
            list(writes)


def make_space(etcd: EtcdCluster) -> None:
    """What etcd's operator does where there is none."""
    with closing(EtcdClient(etcd.endpoints)) as client:
        client.delete(b"/filler")
        client.compact(client.range(b"/filler").revision)
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")
