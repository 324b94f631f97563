"""`rallyctl logs`, `events` and `wait`, for jobs of several nodes."""

from __future__ import annotations

import json
import shlex
import signal
import time
from functools import partial

from tests.jobs.launching import RALLYCTL, RALLYRUN, TIMEOUT, AtOnce, Job, Launcher
from tests.jobs.nodes import Node, all_end, all_up, c10d
from tests.jobs.test_control_plane import outside, serve
from tests.jobs.test_steering import SECRET, Operator, endpoint_of, listed_job
from tests.ports import free_port

TEED = ("--tee=3", "--log-dir=logs", "--nproc-per-node=2")


def follow(rallyrun: Launcher, host: Node, *words: str) -> Job:
    return rallyrun.command([*RALLYCTL, *words, f"127.0.0.1:{endpoint_of(host)}"])


def of_rank(rank: int, lines: list[str]) -> list[str]:
    label = f"[rank{rank}]: "
    return [each.removeprefix(label) for each in lines if each.startswith(label)]


def logs_of_all_nodes_are_followed_through_a_restart_to_the_last_line(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", "--max-restarts=1", *TEED)
    host = job.host("A")
    nodes = [host, job.start("B")]
    follower = follow(rallyrun, host, "logs", "-f")
    for rank in range(4):
        follower.until(lambda lines, rank=rank: len(of_rank(rank, lines)) == 1, f"rank {rank} is up")  # type: ignore[misc]
    job.say("fail-B-0")
    for rank in range(4):
        follower.until(
            lambda lines, rank=rank: sum("NODE" in each for each in of_rank(rank, lines)) == 2,  # type: ignore[misc]
            f"rank {rank} is up again",
        )
    job.say("finish")
    all_end(nodes, 0)
    assert follower.ends() == 0, follower.err
    assert "the job has succeeded" in follower.err
    for rank in range(4):
        first, *failed, second, last = of_rank(rank, follower.out)
        assert [json.loads(each)["TORCHELASTIC_RESTART_COUNT"] for each in (first, second)] == ["0", "1"]
        assert [json.loads(each)["RANK"] for each in (first, second)] == [str(rank)] * 2
        assert set(failed) <= {"B fails in 0"}
        assert last == "done", "what is written last is shown too"
    assert any("B fails in 0" in each for each in follower.out)


def the_last_lines_of_some_ranks(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", *TEED)
    host = job.host("A")
    nodes = [host, job.start("B")]
    for node in nodes:
        node.job.until(lambda lines: sum('"NODE"' in each for each in lines) == 2, "its workers are up")
    ask = Operator(rallyrun, f"127.0.0.1:{endpoint_of(host)}")
    code, text = ask("logs", "3")
    assert (code, json.loads(text)["RANK"]) == (0, "3"), "of one rank the lines are as they are"
    code, text = ask("logs", "0", "2-3")
    assert code == 0
    assert sorted(each.partition(":")[0] for each in text.splitlines()) == ["[rank0]", "[rank2]", "[rank3]"]
    code, text = ask("logs", "4")
    assert (code, "no rank 4" in text) == (1, True)
    code, text = ask("logs", "-f", "4")
    assert (code, "no rank 4" in text) == (1, True)
    code, text = ask("status")
    assert "command   " in text
    assert f"logs      {rallyrun.folder / 'logs'}/job_" in text
    job.say("finish")
    all_end(nodes, 0)


def a_console_that_is_a_file_is_shown_without_other_log_files(rallyrun: Launcher) -> None:
    port = free_port()
    script = rallyrun.script("import time\nprint('begins', flush=True)\ntime.sleep(600)\n", "begins.py")
    flags = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--nproc-per-node=2"]
    command = shlex.join([*RALLYRUN, *flags, script])
    job = rallyrun.command(["sh", "-c", f"exec {command} > out.txt 2>&1"])
    ask = Operator(rallyrun, f"127.0.0.1:{port}")
    deadline, lines = time.monotonic() + TIMEOUT, list[str]()
    while lines.count("begins") < 2 and time.monotonic() < deadline:
        lines = [each.partition("]: ")[2] for each in ask("logs")[1].splitlines()]
    assert lines.count("begins") == 2, "of both workers, in the one file of their node"
    assert ask("stop")[0] == 0
    assert job.ends() == 1


def what_happens_is_followed_and_the_end_is_waited_for(rallyrun: Launcher, *, how: str, code: int) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    job = outside(rallyrun, port, "2")
    nodes = job.up()
    other = outside(rallyrun, port, "1", "--rdzv-id=other").start("C")
    other.comes_up(1)
    where = (str(nodes[0].job.pid),)  # a job of this machine goes by its number, also beside others at its endpoint
    waiting = rallyrun.command([*RALLYCTL, "wait", *where])
    events = rallyrun.command([*RALLYCTL, "events", "-f", "--json", *where])
    events.until(lambda lines: any("round_started" in each for each in lines), "what was before is shown")
    if how == "stop":
        assert Operator(rallyrun, *where)("stop")[0] == 0
    else:
        job.say(how)
    for node in nodes:
        node.job.ends()
    assert waiting.ends() == code, waiting.err
    assert waiting.out[0].startswith("the job has ")
    assert events.ends() == 0
    told = [json.loads(each) for each in events.out]
    assert [each["number"] for each in told] == sorted({each["number"] for each in told}), "each once"
    assert told[-1]["kind"] == "job_ended"
    assert Operator(rallyrun, *where)("wait")[0] == code, "what has ended is not waited for"
    job.say("finish")
    assert other.job.ends() == 0
    server.signal(15)
    assert server.ends() == 0


def a_job_that_is_not_there_cannot_be_waited_for(rallyrun: Launcher) -> None:
    code, text = Operator(rallyrun, f"127.0.0.1:{free_port()}")("wait")
    assert (code, "no control plane answers" in text) == (69, True)


def one_that_must_be_named_is_a_wrong_usage(rallyrun: Launcher) -> None:
    port = free_port()
    server = serve(rallyrun, port)
    where = f"127.0.0.1:{port}"
    code, text = Operator(rallyrun, where)("wait")
    assert (code, "no job is running at this control plane" in text) == (69, True)
    assert Operator(rallyrun, where)("stop")[0] == 1
    jobs = [outside(rallyrun, port, "1", f"--rdzv-id={name}") for name in "ab"]
    nodes = [job.start(name) for job, name in zip(jobs, "AB", strict=True)]
    for node in nodes:
        node.comes_up(1)
    for verb in ("wait", "stop", "logs", "events"):
        code, text = Operator(rallyrun, where)(verb)
        assert (code, "choose one with --rdzv-id" in text) == (2, True)
    Operator(rallyrun, where, "--rdzv-id=a")("restart")
    nodes[0].comes_up(1, starts=2)
    listed = Operator(rallyrun, where)("status")[1].splitlines()
    column = listed[0].split().index("RESTARTS")
    row = next(line for line in listed if line.startswith("a "))
    assert row.split()[column - len(listed[0].split())] == "0", "an operator's restart uses none"
    jobs[0].say("finish")
    all_end(nodes, 0)
    server.signal(15)
    assert server.ends() == 0


def who_follows_a_job_that_a_signal_ends_is_told(rallyrun: Launcher, *, number: int) -> None:
    """Its control plane is gone with its agent; on this machine it is known how the job has ended."""
    job = rallyrun(
        "--standalone",
        "--tee=3",
        "--log-dir=logs",
        rallyrun.script("import time\nprint('up', flush=True)\ntime.sleep(600)\n"),
    )
    job.until(lambda lines: any("up" in each for each in lines), "the worker is up")
    listed_job(rallyrun, Node("A", job))
    where = (str(job.pid),)
    waiting = rallyrun.command([*RALLYCTL, "wait", *where])
    events = rallyrun.command([*RALLYCTL, "events", "-f", *where])
    logs = rallyrun.command([*RALLYCTL, "logs", "-f", "-n", "1", f"--rdzv-endpoint={job.pid}"])
    watching = rallyrun.command([*RALLYCTL, "status", "--watch", *where])
    events.until(lambda lines: any("round 0 started" in each for each in lines), "it follows")
    logs.until(lambda lines: any("up" in each for each in lines), "it follows")
    watching.until(lambda lines: any("running" in each for each in lines), "it follows")
    began = time.monotonic()
    job.signal(number)
    job.ends()
    code, text = Operator(rallyrun, *where)("wait")
    assert (waiting.ends(), waiting.out) == (code, text.splitlines())
    assert code not in (0, 69)
    assert (events.ends(), logs.ends(), watching.ends()) == (0, 0, 4)
    assert time.monotonic() - began < 60, "nobody waits for the control plane to come back"
    assert text.strip() in events.err
    assert text.strip() in logs.err


def logs_of_a_job_with_a_secret_are_for_those_who_have_it(rallyrun: Launcher) -> None:
    secret = {"RALLYPOINT_SECRET": SECRET}
    job = c10d(rallyrun, "1", *TEED, env=secret)
    host = job.host("A")
    host.job.until(lambda lines: sum('"NODE"' in each for each in lines) == 2, "its workers are up")
    where = f"127.0.0.1:{endpoint_of(host)}"
    code, text = Operator(rallyrun, where)("logs")
    assert code == 1
    assert "NODE" not in text
    code, text = Operator(rallyrun, where, env=secret)("logs")
    assert (code, text.count('"NODE"')) == (0, 2), text
    job.say("finish")
    assert host.job.ends() == 0


def a_size_that_cannot_be_reached_is_forced_and_shown_as_pending(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2")
    nodes = job.up(hosted=True)
    host = nodes[0]
    ask = Operator(rallyrun, f"127.0.0.1:{endpoint_of(host)}")
    code, text = ask("resize", "9")
    assert code == 1
    assert "its next failure would stop it until 7 more have joined" in text
    code, text = ask("resize", "9", "--force")
    assert (code, "from the next round on, which needs 7 more nodes" in text) == (0, True)
    assert "(next round: min 9, max 9)" in ask("status")[1]
    assert ask("stop")[0] == 0
    all_end(nodes, 1)


def a_drained_node_says_by_whom(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "1:2", "--exit-codes=classified")
    host = job.host("A")
    nodes = [host, job.start("B", env={"RALLYPOINT_VERDICT_FILE": str(rallyrun.folder / "b.json")})]
    all_up(nodes, world_size=2)
    ask = Operator(rallyrun, f"127.0.0.1:{endpoint_of(host)}")
    assert ask("drain", "1")[0] == 0
    assert nodes[1].job.ends() == 0
    assert "is draining this node" in nodes[1].job.err
    assert "after SIGTERM" not in nodes[1].job.err
    message = json.loads((rallyrun.folder / "b.json").read_text())["message"]
    assert message.startswith("this node was drained by ")
    assert message.endswith("and left the job; the job continues on 1 other node")
    host.comes_up(1, starts=2, world_size=1)
    assert "left (drained by " in host.job.err
    assert any("a node left (drained by " in each["text"] for each in ask.status()[1]["events"])
    job.say("finish")
    assert host.job.ends() == 0


def test_what_a_job_writes_and_what_happens_to_it(at_once: AtOnce) -> None:
    at_once(
        logs_of_all_nodes_are_followed_through_a_restart_to_the_last_line,
        the_last_lines_of_some_ranks,
        one_that_must_be_named_is_a_wrong_usage,
        partial(who_follows_a_job_that_a_signal_ends_is_told, number=signal.SIGTERM),
        partial(who_follows_a_job_that_a_signal_ends_is_told, number=signal.SIGINT),
        a_console_that_is_a_file_is_shown_without_other_log_files,
        *(
            partial(what_happens_is_followed_and_the_end_is_waited_for, how=how, code=code)
            for how, code in (("finish", 0), ("fail-A-0", 1), ("stop", 94))
        ),
        a_job_that_is_not_there_cannot_be_waited_for,
        logs_of_a_job_with_a_secret_are_for_those_who_have_it,
        a_size_that_cannot_be_reached_is_forced_and_shown_as_pending,
        a_drained_node_says_by_whom,
    )
