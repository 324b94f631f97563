"""Standby workers (`--standby`) take the places of dead workers; whatever happens to them costs nothing."""

from __future__ import annotations

import os
import re
import signal

from tests.jobs.launching import AtOnce, Job, Launcher
from tests.jobs.nodes import Nodes, c10d
from tests.jobs.test_inprocess import Up, finishes, goes_on, is_new, say, ups
from tests.jobs.test_steering import Operator, endpoint_of

WORKER = """
import os, sys, time
from rallypoint import inprocess, notices

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def prepare():
    standby = "RANK" not in os.environ
    say("prepares", "standby" if standby else "worker", os.getpid())
    while standby and os.path.exists("hold"):
        time.sleep(0.02)
    if standby and os.path.exists("fail"):
        raise ValueError("there is nothing to build")
    if standby:
        os.environ.__class__ = Held
    return os.getpid()

class Held(type(os.environ)):  # who enters a round stays on its way there
    def __setitem__(self, name, value):
        while name == "RANK" and os.path.exists("hold-entry"):
            time.sleep(0.02)
        super().__setitem__(name, value)

@inprocess.resumable(prepare=prepare)
def train(round):
    assert round.prepared == os.getpid()
    rank, count = os.environ["RANK"], round.restart_count
    calls = round.memory["calls"] = round.memory.get("calls", 0) + 1
    assert round.survived or calls == 1
    say("up", rank, os.environ["WORLD_SIZE"], count, os.getpid(), calls)
    step = 0
    while not os.path.exists("finish"):
        if os.path.exists(f"hang-{count}"):
            time.sleep(0.02)
            continue
        notices.progress(step)
        step += 1
        time.sleep(0.02)
    say("done", rank, os.environ["LOCAL_RANK"])

train()
"""


def standbys(job: Job) -> list[int]:
    """The pids of the standby workers that have begun to prepare, in the order in which they did."""
    return [int(line.split()[-1]) for line in job.out if "prepares standby" in line]


def next_standby(job: Job, number: int, *, ready: bool = True) -> int:
    """The pid of the `number`-th standby worker of a node, from 1 on, once it prepares, or is ready."""
    job.until(lambda lines: sum("prepares standby" in line for line in lines) >= number, f"standby worker {number}")
    pid = standbys(job)[number - 1]
    if ready:
        job.until_err(f"a standby worker is ready (process {pid})")
    return pid


def start(rallyrun: Launcher, *flags: str, workers: int = 2) -> Job:
    common = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=9", "--standby=1")
    return rallyrun(*common, *flags, rallyrun.script(WORKER))


def one_takes_the_place_of_who_dies_and_another_follows(rallyrun: Launcher) -> None:
    job = start(rallyrun, "--tee=3", "--log-dir=logs")
    before = ups(job, (0, 1), 2)
    for count, victim in ((1, 1), (2, 0)):
        standby = next_standby(job, count)
        os.kill(before[victim].pid, signal.SIGKILL)
        after = ups(job, (0, 1), 2, count)
        assert goes_on(before[1 - victim], after[1 - victim])
        assert (after[victim].pid, after[victim].calls) == (standby, 1)
        before = after
    finishes(rallyrun, job)
    assert sorted(line for line in job.out if "done" in line) == ["[default0]:done 0 0", "[default1]:done 1 1"]
    (log,) = rallyrun.folder.glob("logs/*/attempt_2/0/stdout.log")
    assert log.resolve().parent.parent.name == "attempt_standby.1"


def of_two_that_die_at_once_one_is_replaced_by_it(rallyrun: Launcher) -> None:
    job = start(rallyrun, workers=3)
    before, standby = ups(job, (0, 1, 2), 3), next_standby(job, 1)
    job.signal(signal.SIGSTOP)
    for rank in (0, 1):
        os.kill(before[rank].pid, signal.SIGKILL)
    job.signal(signal.SIGCONT)
    after = ups(job, (0, 1, 2), 3, 1)
    assert goes_on(before[2], after[2])
    assert after[0].pid == standby
    assert is_new(before[1], after[1])
    finishes(rallyrun, job)


def one_that_is_killed_costs_nothing(rallyrun: Launcher) -> None:
    say(rallyrun, "hold")
    job = start(rallyrun)
    before = ups(job, (0, 1), 2)
    os.kill(first := next_standby(job, 1, ready=False), signal.SIGKILL)
    job.until_err(
        f"the standby worker process {first} failed: Signal 9 (SIGKILL) received by PID {first}; "
        "another one will be started"
    )
    (rallyrun.folder / "hold").unlink()
    os.kill(second := next_standby(job, 2), signal.SIGKILL)
    job.until_err(f"the standby worker process {second} failed")
    third = next_standby(job, 3)
    os.kill(before[0].pid, signal.SIGKILL)
    assert ups(job, (0, 1), 2, 1)[0].pid == third
    finishes(rallyrun, job)


def one_that_cannot_prepare_costs_nothing(rallyrun: Launcher) -> None:
    say(rallyrun, "fail")
    job = start(rallyrun)
    before = ups(job, (0, 1), 2)
    job.until_err("no more will be started after 3")
    assert "ValueError: there is nothing to build" in job.err
    os.kill(before[0].pid, signal.SIGKILL)
    assert is_new(before[0], ups(job, (0, 1), 2, 1)[0])
    finishes(rallyrun, job)
    assert len(standbys(job)) == 3


def on_its_way(rallyrun: Launcher, hold: str, workers: int) -> tuple[Job, dict[int, Up], int]:
    """A job whose standby worker has the place of local rank 1, and is not in its function yet; who is, and its pid."""
    say(rallyrun, hold)
    job = start(rallyrun, workers=workers)
    before = ups(job, tuple(range(workers)), workers)
    standby = next_standby(job, 1, ready=hold == "hold-entry")
    os.kill(before.pop(1).pid, signal.SIGKILL)
    job.until_err(f"a standby worker is taking over as local rank 1 (process {standby})")
    after = ups(job, tuple(before), workers, 1)
    assert all(goes_on(before[rank], after[rank]) for rank in before)
    return job, after, standby


def one_that_is_on_its_way_dies_as_a_worker(rallyrun: Launcher, hold: str) -> None:
    job, before, standby = on_its_way(rallyrun, hold, 2)
    os.kill(standby, signal.SIGKILL)
    after = ups(job, (0, 1), 2, 2)
    assert goes_on(before[0], after[0])
    assert after[1].calls == 1
    (rallyrun.folder / hold).unlink()
    finishes(rallyrun, job)


def one_that_is_on_its_way_leaves_the_round_of_another_death(rallyrun: Launcher, hold: str) -> None:
    job, before, standby = on_its_way(rallyrun, hold, 3)
    os.kill(before[2].pid, signal.SIGKILL)
    if hold == "hold-entry":  # one that prepares leaves a round by itself, one that enters when it is there
        job.until_err("restarting the workers", times=2)
        (rallyrun.folder / hold).unlink()
    ups(job, (0, 2), 3, 2)
    assert job.err.count("2 of 3 workers keep their processes") == 2
    (rallyrun.folder / hold).unlink(missing_ok=True)
    assert ups(job, (1,), 3, 2)[1].pid == standby
    finishes(rallyrun, job)


def one_that_dies_with_the_worker_is_not_waited_for(rallyrun: Launcher) -> None:
    job = start(rallyrun)
    before, standby = ups(job, (0, 1), 2), next_standby(job, 1)
    job.signal(signal.SIGSTOP)
    os.kill(before[1].pid, signal.SIGKILL)
    os.kill(standby, signal.SIGKILL)
    job.signal(signal.SIGCONT)
    after = ups(job, (0, 1), 2, 1)
    assert goes_on(before[0], after[0])
    assert is_new(before[1], after[1])
    finishes(rallyrun, job)
    assert f"the standby worker process {standby} failed" in job.err


def one_that_is_stopped_is_left_out(rallyrun: Launcher) -> None:
    job = start(rallyrun)
    before, standby = ups(job, (0, 1), 2), next_standby(job, 1)
    os.kill(standby, signal.SIGSTOP)
    os.kill(before[1].pid, signal.SIGKILL)
    after = ups(job, (0, 1), 2, 1)
    assert after[1].pid not in (before[1].pid, standby)
    os.kill(standby, signal.SIGCONT)
    os.kill(after[1].pid, signal.SIGKILL)
    assert ups(job, (0, 1), 2, 2)[1].pid == standby
    finishes(rallyrun, job)


def a_hang_does_not_disturb_it(rallyrun: Launcher) -> None:
    job = start(rallyrun, "--hang-timeout=3", "--on-hang=restart", "--log-dir=logs")
    before, standby = ups(job, (0, 1), 2), next_standby(job, 1)
    say(rallyrun, "hang-0")
    after = ups(job, (0, 1), 2, 1)
    assert goes_on(before[0], after[0])
    os.kill(after[0].pid, signal.SIGKILL)
    assert ups(job, (0, 1), 2, 2)[0].pid == standby
    finishes(rallyrun, job)


def it_ends_with_the_job(rallyrun: Launcher, number: int) -> None:
    job = start(rallyrun)
    ups(job, (0, 1), 2)
    standby = next_standby(job, 1)
    job.signal(number)
    assert job.ends() == (-signal.SIGKILL if number == signal.SIGKILL else 1)
    rallyrun.until_gone(standby)


def a_script_that_prepares_nothing_has_none(rallyrun: Launcher) -> None:
    script = WORKER.replace("@inprocess.resumable(prepare=prepare)", "@inprocess.resumable").replace(
        "    assert round.prepared == os.getpid()\n", ""
    )
    job = rallyrun("--standalone", "--nproc-per-node=2", "--standby=1", rallyrun.script(script))
    job.until_err("Preloaded for restarted workers")
    job.until_err("no standby worker was started: the script has no function of rallypoint.inprocess with `prepare`")
    finishes(rallyrun, job)
    assert not standbys(job)


def what_it_imports_without_its_rank_is_named(rallyrun: Launcher) -> None:
    """As torchmetrics does, which has rank 0 then wherever the standby worker enters."""
    packages = rallyrun.folder / "site-packages"  # the only ones that are looked at
    packages.mkdir()
    (packages / "reads_early.py").write_text("import os\nRANK = os.environ.get('LOCAL_RANK', '0')\n")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=9", "--standby=1")
    script = rallyrun.script(f"import reads_early\n{WORKER}")
    job = rallyrun(*flags, script, env={"PYTHONPATH": str(packages)})
    ups(job, (0, 1), 2)
    next_standby(job, 1)
    job.until_err("a standby worker imports reads_early: reads_early.py:2 reads LOCAL_RANK before it has a rank")
    finishes(rallyrun, job)


def test_on_one_node(at_once: AtOnce) -> None:
    def by_sigterm(rallyrun: Launcher) -> None:
        it_ends_with_the_job(rallyrun, signal.SIGTERM)

    def by_sigkill(rallyrun: Launcher) -> None:
        it_ends_with_the_job(rallyrun, signal.SIGKILL)

    def preparing_it_dies(rallyrun: Launcher) -> None:
        one_that_is_on_its_way_dies_as_a_worker(rallyrun, "hold")

    def entering_it_dies(rallyrun: Launcher) -> None:
        one_that_is_on_its_way_dies_as_a_worker(rallyrun, "hold-entry")

    def preparing_it_leaves(rallyrun: Launcher) -> None:
        one_that_is_on_its_way_leaves_the_round_of_another_death(rallyrun, "hold")

    def entering_it_leaves(rallyrun: Launcher) -> None:
        one_that_is_on_its_way_leaves_the_round_of_another_death(rallyrun, "hold-entry")

    at_once(
        what_it_imports_without_its_rank_is_named,
        one_takes_the_place_of_who_dies_and_another_follows,
        of_two_that_die_at_once_one_is_replaced_by_it,
        one_that_is_killed_costs_nothing,
        one_that_cannot_prepare_costs_nothing,
        preparing_it_dies,
        entering_it_dies,
        preparing_it_leaves,
        entering_it_leaves,
        one_that_dies_with_the_worker_is_not_waited_for,
        one_that_is_stopped_is_left_out,
        a_hang_does_not_disturb_it,
        by_sigterm,
        by_sigkill,
        a_script_that_prepares_nothing_has_none,
    )


# Several nodes


def nodes_of(rallyrun: Launcher, nnodes: str, *flags: str, conf: str = "") -> Nodes:
    nodes = c10d(rallyrun, nnodes, "--max-restarts=9", "--standby=1", *flags, conf=conf)
    nodes.script = rallyrun.script(WORKER)
    return nodes


def who_is_the_only_one_of_its_node_is_replaced(rallyrun: Launcher) -> None:
    nodes = nodes_of(rallyrun, "2")
    a, b = nodes.host("A"), nodes.start("B")
    before = {**ups(a.job, (0,), 2), **ups(b.job, (1,), 2)}
    standby = {0: next_standby(a.job, 1), 1: next_standby(b.job, 1)}
    for rank, job, other in ((1, b.job, a.job), (0, a.job, b.job)):
        os.kill(before[rank].pid, signal.SIGKILL)
        assert ups(job, (rank,), 2, 2 - rank)[rank].pid == standby[rank]
        after = ups(other, (1 - rank,), 2, 2 - rank)[1 - rank]
        assert goes_on(before[1 - rank], after)
        before[1 - rank] = after
        before[rank] = ups(job, (rank,), 2, 2 - rank)[rank]
    finishes(rallyrun, a.job, b.job)


def nodes_come_go_and_are_drained_beside_it(rallyrun: Launcher) -> None:
    nodes = nodes_of(rallyrun, "1:3", conf="last_call_timeout=3")
    a = nodes.host("A")
    first, standby = ups(a.job, (0,), 1)[0], next_standby(a.job, 1)
    b = nodes.start("B")
    second = ups(a.job, (0,), 2)[0]
    assert goes_on(first, second)
    other = next_standby(b.job, 1)
    ask = Operator(rallyrun, f"127.0.0.1:{endpoint_of(a)}", "--rdzv-id=job")
    code, text = ask("status")
    assert (code, "standby   2 of 2 workers ready" in text) == (0, True), text
    assert ask("drain", "1")[0] == 0
    assert b.job.ends() == 0, b.job.err
    rallyrun.until_gone(other)
    third = ups(a.job, (0,), 1)[0]
    assert goes_on(second, third)
    os.kill(third.pid, signal.SIGKILL)
    assert ups(a.job, (0,), 1, 1)[0].pid == standby
    finishes(rallyrun, a.job)


def a_spare_node_is_ready_before_it_is_needed(rallyrun: Launcher) -> None:
    nodes = nodes_of(rallyrun, "2")
    a, b = nodes.host("A"), nodes.start("B")
    ups(a.job, (0,), 2), ups(b.job, (1,), 2)
    spare = nodes.start("C")
    standby = next_standby(spare.job, 1)
    b.dies()
    spare.job.until(
        lambda lines: any(re.match(rf"up 1 2 \d {standby} 1", line) for line in lines), "its standby worker"
    )
    finishes(rallyrun, a.job, spare.job)


def a_node_that_a_resize_brings_in_is_ready_before(rallyrun: Launcher) -> None:
    nodes = nodes_of(rallyrun, "2")
    a, b = nodes.host("A"), nodes.start("B")
    before = {**ups(a.job, (0,), 2), **ups(b.job, (1,), 2)}
    c = nodes.start("C")
    standby = next_standby(c.job, 1)
    ask = Operator(rallyrun, f"127.0.0.1:{endpoint_of(a)}", "--rdzv-id=job")
    assert ask("resize", "2:3")[0] == 0
    assert ups(c.job, (2,), 3)[2].pid == standby
    after = {**ups(a.job, (0,), 3), **ups(b.job, (1,), 3)}
    assert all(goes_on(before[rank], after[rank]) for rank in before)
    finishes(rallyrun, a.job, b.job, c.job)


def test_on_several_nodes(at_once: AtOnce) -> None:
    at_once(
        who_is_the_only_one_of_its_node_is_replaced,
        nodes_come_go_and_are_drained_beside_it,
        a_spare_node_is_ready_before_it_is_needed,
        a_node_that_a_resize_brings_in_is_ready_before,
    )
