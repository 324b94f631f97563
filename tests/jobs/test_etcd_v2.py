"""Whole jobs with `--rdzv-backend=etcd-v2` over a real etcd."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from functools import partial

import pytest

from rallypoint.base.endpoint import Endpoint
from tests.etcd_cluster import EtcdCluster, running
from tests.jobs.launching import AtOnce, Launcher
from tests.jobs.nodes import Nodes, all_end, all_ranks, common, root_cause, told_in_short
from tests.ports import free_port

pytestmark = pytest.mark.etcd


def one_member(rallyrun: Launcher, *arguments: str) -> AbstractContextManager[EtcdCluster]:
    """An etcd of one member, which may be killed without another job's notice."""
    return running(rallyrun.folder / "etcd", 1, arguments=arguments)


def job(rallyrun: Launcher, nnodes: str, *endpoints: Endpoint, conf: str = "", flags: tuple[str, ...] = ()) -> Nodes:
    place = ",".join(map(str, endpoints))
    told = f"--rdzv-conf=last_call_timeout=2,{conf}".rstrip(",")
    return Nodes(
        rallyrun,
        f"--nnodes={nnodes}",
        "--rdzv-backend=etcd-v2",
        f"--rdzv-endpoint={place}",
        f"--rdzv-id={rallyrun.mark}",
        told,
        *flags,
    )


def a_worker_fails_and_the_job_finishes(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    made = job(rallyrun, "2", etcd.endpoints[0], flags=("--nproc-per-node=2", "--max-restarts=1"))
    nodes = [made.start("A"), made.start("B")]
    for node in nodes:
        node.comes_up(2, world_size=4)
    assert all_ranks(nodes, [2, 2]) == [0, 1, 2, 3]
    made.say("fail-A-0")
    for node in nodes:
        node.comes_up(2, starts=2, world_size=4)
    assert common(nodes, [2, 2], "TORCHELASTIC_RESTART_COUNT") == "1"
    assert common(nodes, [2, 2], "TORCHELASTIC_USE_AGENT_STORE") == "True"
    made.say("finish")
    all_end(nodes, 0)


def all_nodes_tell_the_same_cause(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    made = job(rallyrun, "2", etcd.endpoints[1])
    nodes = [made.start("A"), made.start("B")]
    for node in nodes:
        node.comes_up(1, world_size=2)
    made.say("fail-B-0")
    all_end(nodes, 1)
    assert "  rank      : " in "\n".join(root_cause(nodes[1]))
    assert told_in_short(nodes[0]).startswith(f"rank {nodes[1].ranks(1)[0]} failed on ")
    late = made.start("C")
    assert late.job.ends() == 1
    assert "the job has ended, no node can join it any more: it has failed" in late.job.err


def an_agent_is_killed_and_another_comes(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    conf = "keep_alive_interval=1,keep_alive_max_attempt=5"
    made = job(rallyrun, "1:2", etcd.endpoints[2], conf=conf)
    nodes = [made.start("A"), made.start("B")]
    for node in nodes:
        node.comes_up(1, world_size=2)
    lost = nodes.pop()
    lost.dies()
    nodes[0].comes_up(1, starts=2, world_size=1)
    nodes.append(made.start("C"))
    nodes[0].comes_up(1, starts=3, world_size=2)
    nodes[1].comes_up(1, world_size=2)
    assert common(nodes, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0", "nobody's workers have failed"
    made.say("finish")
    all_end(nodes, 0)


def a_preempted_job_ends_on_all_nodes(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    made = job(rallyrun, "2", etcd.endpoints[0], conf="notice_timeout=1", flags=("--preempt-signals=SIGUSR2",))
    nodes = [made.start("A"), made.start("B")]
    for node in nodes:
        node.comes_up(1, world_size=2)
    nodes[1].job.signal(signal.SIGUSR2)
    all_end(nodes, 143)
    assert all("the job was preempted, since" in node.job.err for node in nodes)


def workers_run_on_while_etcd_is_away(rallyrun: Launcher) -> None:
    with one_member(rallyrun, "--enable-v2") as etcd:
        made = job(rallyrun, "2", *etcd.endpoints, flags=("--max-restarts=1",))
        nodes = [made.start("A"), made.start("B")]
        for node in nodes:
            node.comes_up(1, world_size=2)
        member = etcd.members[0]
        member.kill()
        for node in nodes:
            node.job.until_err("is out of reach")
        made.say("fail-A-0")
        nodes[0].job.until_err("failed (exitcode: 1)")
        member.start()
        for node in nodes:
            node.comes_up(1, starts=2, world_size=2)
        assert common(nodes, [1, 1], "TORCHELASTIC_RESTART_COUNT") == "1", "the failure is counted once"
        made.say("finish")
        all_end(nodes, 0)


def test_jobs_whose_etcd_is_there_and_one_whose_etcd_goes_away(at_once: AtOnce, etcd: EtcdCluster) -> None:
    at_once(
        partial(an_agent_is_killed_and_another_comes, etcd=etcd),
        partial(a_worker_fails_and_the_job_finishes, etcd=etcd),
        partial(all_nodes_tell_the_same_cause, etcd=etcd),
        partial(a_preempted_job_ends_on_all_nodes, etcd=etcd),
        workers_run_on_while_etcd_is_away,
    )


def a_member_of_three_is_lost(rallyrun: Launcher, *, etcd: EtcdCluster) -> None:
    made = job(rallyrun, "2", *etcd.endpoints, flags=("--max-restarts=1",))
    nodes = [made.start("A"), made.start("B")]
    for node in nodes:
        node.comes_up(1, world_size=2)
    etcd.members[0].kill()  # the one that all have asked
    made.say("fail-B-0")
    for node in nodes:
        node.comes_up(1, starts=2, world_size=2)
    made.say("finish")
    all_end(nodes, 0)


def an_etcd_that_comes_late(rallyrun: Launcher) -> None:
    with one_member(rallyrun, "--enable-v2") as etcd:
        member = etcd.members[0]
        member.kill()
        made = job(rallyrun, "1", *etcd.endpoints)
        node = made.start("A")
        node.job.until_err(f"no etcd answers at {member.endpoint} (Connection refused); trying again for another")
        member.start()
        node.comes_up(1)
        made.say("finish")
        all_end([node], 0)


def no_etcd_at_the_endpoint(rallyrun: Launcher) -> None:
    place = Endpoint("127.0.0.1", free_port())
    node = job(rallyrun, "1", place, conf="join_timeout=2").start("A")
    assert node.job.ends() == 1
    last = node.job.err.splitlines()[-1]
    assert last.startswith(f"rallyrun: error: no etcd answers at {place} (Connection refused); it has not answered")
    assert "Traceback" not in node.job.err


def an_interrupt_while_there_is_no_etcd(rallyrun: Launcher) -> None:
    node = job(rallyrun, "1", Endpoint("127.0.0.1", free_port())).start("A")
    node.job.until_err("trying again for another")
    began = time.monotonic()
    node.job.signal(signal.SIGINT)
    assert node.job.ends() == 1
    assert time.monotonic() - began < 60, "it waits for ten minutes otherwise"


def an_etcd_without_the_v2_api(rallyrun: Launcher) -> None:
    with one_member(rallyrun) as cluster:
        node = job(rallyrun, "1", *cluster.endpoints).start("A")
        assert node.job.ends() == 1
    assert "has no v2 API of etcd: use --rdzv-backend=etcd" in node.job.err
    assert len(node.job.err.splitlines()) == 1


def test_an_etcd_that_is_not_all_there(at_once: AtOnce, etcd: EtcdCluster) -> None:
    at_once(
        partial(a_member_of_three_is_lost, etcd=etcd),
        an_etcd_that_comes_late,
        no_etcd_at_the_endpoint,
        an_interrupt_while_there_is_no_etcd,
        an_etcd_without_the_v2_api,
    )


def test_options_that_cannot_work(rallyrun: Launcher) -> None:
    script = rallyrun.script("print('up')")
    begun = []
    for endpoint, conf, said in (
        ("h1:2379,h2:x", "", "endpoint 'h2:x' has the port 'x'"),
        ("h1", "protocol=ftp", "protocol='ftp' is unknown"),
        ("h1", "ca_cert=/nowhere", "the CA certificates in '/nowhere' cannot be used"),
    ):
        flags = ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"]
        begun.append((rallyrun(*flags, *([f"--rdzv-conf={conf}"] if conf else []), script), said))
    for run, said in begun:
        assert run.ends() == 1
        assert said in run.err
        assert len(run.err.splitlines()) == 1
        assert run.out == []
