"""Workers that continue in their processes after a round (`rallypoint.inprocess`): the agent's part."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

from tests.jobs.launching import AtOnce, Job, Launcher
from tests.jobs.nodes import Node, Nodes, c10d

WORKER = """
import os, subprocess, sys, time
from rallypoint import inprocess, record

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def train(round):
    rank, count = os.environ["RANK"], round.restart_count
    calls = round.memory["calls"] = round.memory.get("calls", 0) + 1
    assert round.survived == (calls > 1)
    say("up", rank, os.environ["WORLD_SIZE"], count, os.getpid(), calls)
    while not os.path.exists("finish") and not os.path.exists(f"return-{rank}-{count}"):
        if os.path.exists(f"raise-{rank}-{count}"):
            raise ValueError(f"rank {rank} of restart {count}")
        time.sleep(0.02)
    say("done", rank)

@record
def main():
    if "CHILDREN" in os.environ:
        child = subprocess.Popen(["sleep", "1000"]).pid
        left_alone = ["sh", "-c", "setsid sleep 1000 >&2 & echo $!"]
        other = subprocess.run(left_alone, stdout=subprocess.PIPE, text=True).stdout
        say("children", os.environ["RANK"], child, other.strip())
    if "PLAIN" in os.environ:
        train(inprocess.Round(False, {}, int(os.environ["TORCHELASTIC_RESTART_COUNT"])))
    else:
        inprocess.resumable(train)()

main()
"""


class Up(NamedTuple):
    """What a worker says when its function is called; `calls` is how often that was in this process."""

    rank: int
    world: int
    restarts: int
    pid: int
    calls: int


def ups(job: Job, ranks: tuple[int, ...], world: int, restarts: int = 0) -> dict[int, Up]:
    """The workers of these ranks in a round, once all of them have said so."""

    def told(lines: list[str]) -> dict[int, Up]:
        words = (line.partition("up ")[2] for line in lines if "up " in line)
        found = {up.rank: up for up in (Up(*map(int, each.split())) for each in words) if up.restarts == restarts}
        return {up.rank: up for up in found.values() if up.world == world and up.rank in ranks}

    return told(job.until(lambda lines: len(told(lines)) == len(ranks), f"{ranks} of {world} in restart {restarts}"))


def goes_on(before: Up, after: Up) -> bool:
    """Whether this is the same process, called once more."""
    return (after.pid, after.calls) == (before.pid, before.calls + 1)


def is_new(before: Up, after: Up) -> bool:
    """Whether this is another process."""
    return after.pid != before.pid and after.calls == 1


def say(rallyrun: Launcher, what: str) -> None:
    (rallyrun.folder / what).touch()


def finishes(rallyrun: Launcher, *jobs: Job) -> None:
    say(rallyrun, "finish")
    for job in jobs:
        assert job.ends() == 0, job.err


# One node


def who_lives_goes_on_and_so_does_what_it_has_started(rallyrun: Launcher) -> None:
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=9", "--tee=3", "--log-dir=logs")
    job = rallyrun(*flags, "--event-log-handler=jsonl:events", rallyrun.script(WORKER), env={"CHILDREN": "1"})
    before = ups(job, (0, 1), 2)
    children = {
        int(rank): (int(child), int(other))
        for _, rank, child, other in (line.split() for line in job.out if "children" in line)
    }
    for restarts in (1, 2):
        os.kill(before[1].pid, signal.SIGKILL)
        after = ups(job, (0, 1), 2, restarts)
        assert goes_on(before[0], after[0])
        assert is_new(before[1], after[1])
        before = after
    assert job.err.count("1 of 2 workers keep their processes") == 2
    for each in children[1]:
        rallyrun.until_gone(each)  # what the dead one has left
    assert Path(f"/proc/{children[0][0]}/comm").read_text() == "sleep\n"
    (log,) = rallyrun.folder.glob("logs/*/attempt_2/0/stdout.log")
    assert log.resolve().parent.parent.name == "attempt_0"
    finishes(rallyrun, job)
    assert sorted(line for line in job.out if "done" in line) == ["[default0]:done 0", "[default1]:done 1"]
    assert "up 0 2 2" in log.read_text()
    rallyrun.until_gone(children[0][0])
    told = map(json.loads, (rallyrun.folder / "events").read_text().splitlines())
    assert [each["survived"] for each in told if each["event"] == "workers_started"] == [[], [0], [0]]


def who_does_not_come_out_is_ended_and_the_others_go_on(rallyrun: Launcher) -> None:
    flags = ("--standalone", "--nproc-per-node=3", "--max-restarts=9", "--inprocess-timeout=3")
    job = rallyrun(*flags, rallyrun.script(WORKER))
    before = ups(job, (0, 1, 2), 3)
    os.kill(before[1].pid, signal.SIGSTOP)
    os.kill(before[2].pid, signal.SIGKILL)
    after = ups(job, (0, 1, 2), 3, 1)
    assert goes_on(before[0], after[0])
    assert is_new(before[1], after[1])
    assert is_new(before[2], after[2])
    told = f"worker process {before[1].pid} (local rank 1) did not leave its function within 3 s"
    assert told in job.err
    finishes(rallyrun, job)


def a_function_that_raises_is_one_failure_of_its_round(rallyrun: Launcher) -> None:
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--log-dir=logs")
    job = rallyrun(*flags, rallyrun.script(WORKER))
    before = ups(job, (0, 1), 2)
    say(rallyrun, "raise-1-0")
    after = ups(job, (0, 1), 2, 1)
    assert goes_on(before[0], after[0])
    assert is_new(before[1], after[1])
    say(rallyrun, "raise-0-1")
    assert job.ends() == 1
    report = job.err[job.err.index("Root Cause") :]
    assert "ValueError: rank 0 of restart 1" in report
    assert f"(pid: {before[0].pid})" in report


def who_had_succeeded_is_started_anew_beside_those_who_go_on(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--nproc-per-node=3", "--max-restarts=9", rallyrun.script(WORKER))
    before = ups(job, (0, 1, 2), 3)
    say(rallyrun, "return-0-0")
    rallyrun.until_gone(before[0].pid)
    os.kill(before[1].pid, signal.SIGKILL)
    after = ups(job, (0, 1, 2), 3, 1)
    assert goes_on(before[2], after[2])
    assert is_new(before[0], after[0])
    assert is_new(before[1], after[1])
    finishes(rallyrun, job)


STALE = """
import os, signal, time
from rallypoint import inprocess
world = []
@inprocess.resumable
def train(round):
    if world:
        raise RuntimeError("the world is known already")
    world.append(os.environ["WORLD_SIZE"])
    os.write(1, f"up {os.environ['RANK']} 2 {round.restart_count} {os.getpid()} 1\\n".encode())
    while not os.path.exists("finish"):
        time.sleep(0.02)
train()
"""


def where_a_survivor_cannot_enter_its_round_all_are_new_from_then_on(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--nproc-per-node=2", "--max-restarts=3", rallyrun.script(STALE))
    os.kill(ups(job, (0, 1), 2)[0].pid, signal.SIGKILL)
    after = ups(job, (0, 1), 2, 2)  # one restart was for the kill, one for the survivor
    assert "local rank 1 failed as soon as it entered another round in its process" in job.err
    os.kill(after[0].pid, signal.SIGKILL)
    last = ups(job, (0, 1), 2, 3)
    assert last[1].pid != after[1].pid
    say(rallyrun, "finish")
    assert job.ends() == 0, job.err


def test_on_one_node(at_once: AtOnce) -> None:
    at_once(
        where_a_survivor_cannot_enter_its_round_all_are_new_from_then_on,
        who_lives_goes_on_and_so_does_what_it_has_started,
        who_does_not_come_out_is_ended_and_the_others_go_on,
        a_function_that_raises_is_one_failure_of_its_round,
        who_had_succeeded_is_started_anew_beside_those_who_go_on,
    )


# Several nodes


def nodes_of(rallyrun: Launcher, nnodes: str, *flags: str, conf: str = "") -> Nodes:
    nodes = c10d(rallyrun, nnodes, "--max-restarts=9", *flags, conf=conf)
    nodes.script = rallyrun.script(WORKER)
    return nodes


def two(nodes: Nodes, **env: str) -> tuple[Node, Node]:
    """A, which has group rank 0, and B."""
    return nodes.first("A"), nodes.start("B", env=env)


def who_dies_while_it_waits_is_started_anew(rallyrun: Launcher) -> None:
    nodes = nodes_of(rallyrun, "2")
    a, b = two(nodes)
    before = ups(a.job, (0,), 2)[0]
    b.dies()
    a.job.until_err("1 of 1 workers are waiting in their processes")
    os.kill(before.pid, signal.SIGKILL)
    a.job.until_err(f"worker process {before.pid} (local rank 0) ended while it was waiting, so it is being restarted")
    b = nodes.start("B")
    ups(b.job, (1,), 2)
    a.job.until(lambda lines: sum("up " in line for line in lines) == 2, "a new worker")
    finishes(rallyrun, a.job, b.job)


def a_node_whose_workers_wait_ends_at_once(rallyrun: Launcher, number: int) -> None:
    a, b = two(nodes_of(rallyrun, "2", "--shutdown-timeout=50"))
    before = ups(a.job, (0,), 2)[0]
    b.dies()
    a.job.until_err("1 of 1 workers are waiting in their processes")
    a.job.signal(number)
    assert a.job.ends() == (-signal.SIGKILL if number == signal.SIGKILL else 1)
    rallyrun.until_gone(before.pid)


def ranks_change_with_the_nodes(rallyrun: Launcher) -> None:
    nodes = nodes_of(rallyrun, "1:3", "--tee=1", "--log-dir=logs", conf="last_call_timeout=5")
    a = nodes.host("A")
    first = ups(a.job, (0,), 1)[0]
    b = nodes.start("B")
    second = ups(a.job, (0,), 2)[0]
    assert goes_on(first, second)
    other = ups(b.job, (1,), 2)[1]
    c = nodes.start("C")
    third, last = ups(a.job, (0,), 3)[0], ups(c.job, (2,), 3)[2]
    assert goes_on(second, third)
    assert goes_on(other, ups(b.job, (1,), 3)[1])
    b.job.signal(signal.SIGTERM)
    assert b.job.ends() == 0, b.job.err
    assert goes_on(third, ups(a.job, (0,), 2)[0])
    assert goes_on(last, ups(c.job, (1,), 2)[1])
    c.job.until(lambda lines: any(line.startswith("[default0]:up 1 2") for line in lines), "its new prefix")
    finishes(rallyrun, a.job, c.job)


def where_one_node_cannot_all_are_started_anew(rallyrun: Launcher) -> None:
    a, b = two(nodes_of(rallyrun, "2"), PLAIN="1")
    before, plain = ups(a.job, (0,), 2)[0], ups(b.job, (1,), 2)[1]
    os.kill(plain.pid, signal.SIGKILL)
    assert is_new(before, ups(a.job, (0,), 2, 1)[0])
    assert is_new(plain, ups(b.job, (1,), 2, 1)[1])
    assert "not all workers of the job can keep theirs" in a.job.err
    finishes(rallyrun, a.job, b.job)


def test_on_several_nodes(at_once: AtOnce) -> None:
    def by_sigterm(rallyrun: Launcher) -> None:
        a_node_whose_workers_wait_ends_at_once(rallyrun, signal.SIGTERM)

    def by_sigkill(rallyrun: Launcher) -> None:
        a_node_whose_workers_wait_ends_at_once(rallyrun, signal.SIGKILL)

    at_once(
        who_dies_while_it_waits_is_started_anew,
        by_sigterm,
        by_sigkill,
        ranks_change_with_the_nodes,
        where_one_node_cannot_all_are_started_anew,
    )
