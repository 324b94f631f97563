"""Workers that go on in their processes (`rallypoint.inprocess`) while others, their agents or their nodes are lost.

Laws, told by the workers themselves: who can go on is the same process, with what it had in memory; a round has one
worker of each rank; what is lost together costs one restart. `launching` sees to it that nothing is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.cluster import Agent, Cluster
from tests.jobs.launching import Launcher, launching, run_at_once
from tests.jobs.nodes import Node, Nodes, c10d
from tests.waiting import until

WORKER = """
import ctypes, os, select, socket, struct, sys, time
from rallypoint import inprocess, notices

e = os.environ

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def told(what):
    return os.path.exists(f"{what}-{os.getpid()}")

def obeys(what):
    os.unlink(f"{what}-{os.getpid()}")
    say(what, os.getpid())

def where():
    return "-".join(e[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))

class Group:
    '''All workers of a round, joined by sockets in which they block.'''
    def __init__(self):
        path, self.root = "group-" + where(), e["RANK"] == "0"
        if self.root:
            listener = socket.create_server((e.get("ADDRESS", "127.0.0.1"), 0))
            with open(path + ".new", "w") as file:
                file.write(str(listener.getsockname()[1]) + " " + listener.getsockname()[0])
            os.rename(path + ".new", path)
            self.sockets = members(listener, int(e["WORLD_SIZE"]) - 1)
            return
        while not os.path.exists(path):
            time.sleep(0.01)
        port, address = open(path).read().split()
        self.sockets = [socket.create_connection((address, int(port)))]
        self.sockets[0].send(where().encode())
    def sum(self, number):
        if not self.root:
            self.sockets[0].send(struct.pack("q", number))
            return receive(self.sockets[0])
        number += sum(map(receive, self.sockets))
        for each in self.sockets:
            each.send(struct.pack("q", number))
        return number

def members(listener, count):
    found, waited_for = [], [listener]
    while len(found) < count:
        for each in select.select(waited_for, [], [])[0]:
            if each is listener:
                waited_for.append(listener.accept()[0])
                continue
            waited_for.remove(each)
            if is_member(each):
                found.append(each)
    return found

def is_member(connection):
    '''A client of a server that had this port earlier may connect as well.'''
    try:
        return connection.recv(len(where())) == where().encode()
    except OSError:
        return False

def receive(connection):
    if not (data := connection.recv(8)):
        raise ConnectionError("a worker is gone")
    return struct.unpack("q", data)[0]

def train(round):
    calls = round.memory["calls"] = round.memory.get("calls", 0) + 1
    assert round.survived == (calls > 1)
    try:
        group = Group()
        total = group.sum(calls)
        say("met", where(), e["RANK"], e["WORLD_SIZE"], round.restart_count, e["LOCAL_RANK"], os.getpid(), calls, total)
        while not group.sum(os.path.exists("finish")):
            all_sleep = group.sum(os.path.exists("sleep"))
            round.memory["step"] = round.memory.get("step", 0) + 1
            notices.progress(round.memory["step"])
            if all_sleep:
                say("sleeps", os.getpid())
                time.sleep(1000)
            if told("stuck"):
                lock = ctypes.create_string_buffer(64)
                ctypes.CDLL(None).pthread_mutex_lock(lock)
                obeys("stuck")
                ctypes.CDLL(None).pthread_mutex_lock(lock)
            time.sleep(0.02)
    finally:
        if told("cleans"):
            say("cleans", os.getpid())
            open(f"is-cleaning-{os.getpid()}", "w").close()
            while told("cleans"):
                time.sleep(0.02)
            say("cleaned", os.getpid())

inprocess.on_round_end(lambda: say("aborts", os.getpid()))

inprocess.resumable(train)()
"""


class Met(NamedTuple):
    """What a worker says when it has met all others of a round; `calls` is how often it was called in its process."""

    where: str
    rank: int
    world: int
    restarts: int
    local_rank: int
    pid: int
    calls: int
    total: int
    """The sum of the calls of all workers of the round."""


Round = dict[int, Met]
"""By rank."""


def meets(world: int, *nodes: Node, before: Sequence[Round] = ()) -> Round:
    """The next round of so many workers, of which each of these nodes has the same number, once all have met."""
    old = {each.where for round_ in before for each in round_.values()}

    def new(lines: list[str]) -> list[Met]:
        told = (Met(where, *map(int, rest)) for _, where, *rest in (line.split() for line in lines if "met " in line))
        return [each for each in told if each.world == world and each.where not in old]

    each_has = world // len(nodes)
    found: list[Met] = []
    for node in nodes:
        found += new(node.job.until(lambda lines: len(new(lines)) >= each_has, f"a new round of {world} workers"))
    assert len({(each.where, each.total, each.restarts) for each in found}) == 1, found
    assert sorted(each.rank for each in found) == list(range(world))
    assert sum(each.calls for each in found) == found[0].total
    return {each.rank: each for each in found}


def go_on(before: Round, after: Round, pids: set[int]) -> None:
    """Just these processes have gone on, with their memory; all others are new."""
    calls = {each.pid: each.calls for each in before.values()}
    assert {each.pid for each in after.values() if each.pid in calls} == pids
    # A round that has ended before all have met was a call too.
    assert all(each.calls > calls[each.pid] for each in after.values() if each.pid in pids)


def restarts(round_: Round) -> int:
    """How many failures the job has had before it."""
    return round_[0].restarts


def pids_of(round_: Round, node: Node) -> list[int]:
    """The processes of a node in a round, by local rank."""
    said = {int(line.split()[6]) for line in node.job.out if line.startswith("met ")}
    return [each.pid for each in sorted(round_.values(), key=lambda each: each.local_rank) if each.pid in said]


def tell(rallyrun: Launcher, what: str, pid: int, node: Node) -> None:
    """Have a worker do something, and wait until it says that it does."""
    (rallyrun.folder / f"{what}-{pid}").touch()
    node.job.until(lambda lines: f"{what} {pid}" in lines, f"worker {pid} {what}")


def is_interrupted(pid: int, node: Node) -> None:
    """Wait until a worker has been interrupted: the first time comes between the first two calls of its hook."""
    node.job.until(lambda lines: lines.count(f"aborts {pid}") > 1, f"worker {pid} is interrupted")


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def finish(rallyrun: Launcher, *nodes: Node) -> None:
    """The workers succeed, and so does the job."""
    (rallyrun.folder / "finish").touch()
    for node in nodes:
        assert node.job.ends() == 0, (node.name, node.job.err)


# Two nodes with two workers each


def pair(rallyrun: Launcher, *flags: str) -> tuple[Nodes, Node, Node, Round]:
    """Nodes, of which the first hosts the control plane, and their first round."""
    nodes = c10d(rallyrun, "2", "--nproc-per-node=2", "--max-restarts=9", *flags)
    nodes.script = rallyrun.script(WORKER)
    a, b = nodes.host("A"), nodes.start("B")
    return nodes, a, b, meets(4, a, b)


def killed_while_coming_out(rallyrun: Launcher) -> None:
    _, a, b, before = pair(rallyrun)
    dead, cleans = pids_of(before, a)
    (rallyrun.folder / f"cleans-{cleans}").touch()
    kill(dead)
    tell(rallyrun, "cleans", cleans, a)
    kill(cleans)
    after = meets(4, a, b, before=[before])
    go_on(before, after, set(pids_of(before, b)))
    assert restarts(after) == 1
    finish(rallyrun, a, b)


def told_of_the_end_while_it_cleans_up(rallyrun: Launcher) -> None:
    """All lose their connections, and clean up, before anybody tells them that the round has ended."""
    _, a, b, before = pair(rallyrun, "--inprocess-timeout=1000")
    root = before[0].pid
    cleaning = [(node, pid) for node in (a, b) for pid in pids_of(before, node) if pid != root]
    for _, pid in cleaning:
        (rallyrun.folder / f"cleans-{pid}").touch()
    for node in (a, b):
        node.job.signal(signal.SIGSTOP)
    kill(root)
    for _, pid in cleaning:  # what they say passes through agents that are stopped
        until((rallyrun.folder / f"is-cleaning-{pid}").exists, f"worker {pid} cleans up")
    for node in (a, b):
        node.job.signal(signal.SIGCONT)
    for node, pid in cleaning:
        is_interrupted(pid, node)
        (rallyrun.folder / f"cleans-{pid}").unlink()
    after = meets(4, a, b, before=[before])
    assert all(f"cleaned {pid}" in node.job.out for node, pid in cleaning)
    go_on(before, after, {pid for _, pid in cleaning})
    assert restarts(after) == 1
    finish(rallyrun, a, b)


def agent_killed_while_a_worker_comes_out(rallyrun: Launcher) -> None:
    nodes, a, b, before = pair(rallyrun)
    dead, cleans = pids_of(before, b)
    (rallyrun.folder / f"cleans-{cleans}").touch()
    kill(dead)
    tell(rallyrun, "cleans", cleans, b)
    a.job.until_err("round 0 ended")  # the worker may come out before its agent has told of the failure
    b.dies()
    rallyrun.until_gone(cleans)
    b = nodes.start("B2")
    after = meets(4, a, b, before=[before])
    go_on(before, after, set(pids_of(before, a)))
    assert restarts(after) == 1
    finish(rallyrun, a, b)


def hung_in_a_collective(rallyrun: Launcher) -> None:
    """Three wait in a system call for one that no signal brings out of a lock."""
    flags = "--hang-timeout=6", "--on-hang=restart", "--inprocess-timeout=4", "--log-dir=logs"
    _, a, b, before = pair(rallyrun, *flags)
    stuck = pids_of(before, a)[1]
    tell(rallyrun, "stuck", stuck, a)
    after = meets(4, a, b, before=[before])
    go_on(before, after, {each.pid for each in before.values()} - {stuck})
    assert restarts(after) == 1
    assert f"worker process {stuck} (local rank 1) did not leave its function within 4 s" in a.job.err
    finish(rallyrun, a, b)


def ended_while_one_is_stuck(rallyrun: Launcher) -> None:
    """Once the end is settled, it is the grace period that counts, and nobody waits for a place in a round."""
    _, a, b, before = pair(rallyrun, "--inprocess-timeout=1000", "--shutdown-timeout=1")
    dead, stuck = pids_of(before, a)
    tell(rallyrun, "stuck", stuck, a)
    kill(dead)
    a.job.until_err("Stopping worker group")
    for node in (a, b):
        node.job.signal(signal.SIGINT)
    for node in (a, b):
        assert node.job.ends() == 1, node.job.err


def test_of_two_nodes(tmp_path: Path) -> None:
    run_at_once(
        tmp_path,
        killed_while_coming_out,
        told_of_the_end_while_it_cleans_up,
        agent_killed_while_a_worker_comes_out,
        hung_in_a_collective,
        ended_while_one_is_stuck,
    )


# Three hosts


def three(cluster: Cluster) -> tuple[list[Agent], Round]:
    """Agents A (which hosts the control plane), B and C with a worker each, and their first round."""
    script = cluster.launcher.script(WORKER)
    agents = [cluster.run(name, [script], env={"ADDRESS": cluster.host(name).address}) for name in "ABC"]
    return agents, meets(3, *agents)


def test_of_a_node_that_falls_silent(cluster: Cluster) -> None:
    (a, b, c), before = three(cluster)
    c.host.cut_off()
    after = meets(2, a, b, before=[before])
    go_on(before, after, {*pids_of(before, a), *pids_of(before, b)})
    assert restarts(after) == 0
    c.is_killed()
    finish(cluster.launcher, a, b)


def test_of_the_node_that_hosts_the_control_plane(cluster: Cluster) -> None:
    (a, b, c), before = three(cluster)
    # Else the end of their connections would be their own failure, as long as nobody can tell them that it is not.
    sleep = cluster.launcher.folder / "sleep"
    sleep.touch()
    for each in (a, b, c):
        each.job.until(lambda lines: any(line.startswith("sleeps ") for line in lines), "all sleep")
    sleep.unlink()
    a.is_killed()
    again = cluster.run("A2", [cluster.launcher.script(WORKER)], on="A", env={"ADDRESS": a.host.address})
    after = meets(3, again, b, c, before=[before])
    go_on(before, after, {*pids_of(before, b), *pids_of(before, c)})
    assert restarts(after) == 0
    finish(cluster.launcher, again, b, c)


# torch


GLOO = """
import os, time, torch
import torch.distributed as dist
from rallypoint import inprocess

e = os.environ

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@inprocess.resumable
def train(round):
    calls = round.memory["calls"] = round.memory.get("calls", 0) + 1
    dist.init_process_group("gloo")
    total, done = torch.tensor(calls), torch.tensor(0)
    dist.all_reduce(total)
    where = e["MASTER_PORT"] + "-" + e["TORCHELASTIC_RESTART_COUNT"]
    ranks = e["RANK"], e["WORLD_SIZE"], round.restart_count, e["LOCAL_RANK"]
    say("met", where, *ranks, os.getpid(), calls, int(total))
    while not done:
        if os.path.exists(f"sleeps-{os.getpid()}"):
            os.unlink(f"sleeps-{os.getpid()}")
            say("sleeps", os.getpid())
            time.sleep(1000)
        time.sleep(0.02)
        done.fill_(os.path.exists("finish"))
        dist.all_reduce(done)
    dist.destroy_process_group()

train()
"""


@pytest.mark.torch
def test_who_waits_in_gloo_for_one_that_lives_goes_on(tmp_path: Path) -> None:
    with launching(tmp_path) as rallyrun:
        flags = "--standalone", "--nproc-per-node=3", "--max-restarts=9"
        node = Node("A", rallyrun(*flags, rallyrun.script(GLOO), env={"GLOO_SOCKET_IFNAME": "lo"}))
        before = meets(3, node)
        waits, sleeps, dead = pids_of(before, node)
        tell(rallyrun, "sleeps", sleeps, node)
        kill(dead)
        after = meets(3, node, before=[before])
        go_on(before, after, {waits, sleeps})
        assert restarts(after) == 1
        finish(rallyrun, node)
