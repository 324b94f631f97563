"""Signals to the agent at any moment: a departure, announced at once; a second ^C; signals that only inform."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial

import pytest

from tests.jobs.launching import AtOnce, Job, Launcher
from tests.jobs.nodes import Nodes, all_end, all_up, c10d
from tests.ports import free_port

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
LONG = 45
"""A grace that no test waits out."""

WORKER = """
import os, signal, sys, time
DEAF, HEARD = {deaf}, []
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def hear(number, _):
    HEARD.append(number)
    say("heard", os.environ["RANK"], signal.Signals(number).name)
for name in DEAF:
    signal.signal(getattr(signal, name), hear)
say("ready", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.getpid())
while not os.path.exists("finish"):
    if os.path.exists("fail-" + os.environ["RANK"]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
    time.sleep(0.01)
say("done", *HEARD)
"""


FORKSERVER = """
import os, sys
def work():
    exec({body!r}, {{"__name__": "worker"}})
if __name__ == "__main__":
    from rallypoint.agent.launch import elastic_launch
    from rallypoint.agent.launch import LaunchConfig
    conf = LaunchConfig(1, 1, 1, run_id="x", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=1,
                        start_method="forkserver", rdzv_configs={{"is_host": True}})
    elastic_launch(conf, work)()
"""

SLURM = {"SLURM_JOB_ID": "7"}


def to_all(rallyrun: Launcher, number: int) -> None:
    """What a scheduler does: the signal to every process of the job."""
    for pid in rallyrun.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def start(rallyrun: Launcher, deaf: list[str], *flags: str, env: dict[str, str] | None = None) -> Job:
    """A job of one node whose workers hear these signals and stay, and are all up."""
    script = rallyrun.script(WORKER.format(deaf=deaf))
    job = rallyrun("--standalone", f"--shutdown-timeout={LONG}", *flags, script, env=env)
    workers = 2 if "--nproc-per-node=2" in flags else 1
    job.until(lambda lines: sum(line.startswith("ready") for line in lines) == workers, f"{workers} workers are ready")
    return job


def heard(lines: list[str], number: signal.Signals) -> int:
    return sum(line.startswith("heard") and line.endswith(number.name) for line in lines)


def _has_heard(number: signal.Signals, lines: list[str]) -> bool:
    return heard(lines, number) > 0


def _heard_so_often(number: signal.Signals, times: int, lines: list[str]) -> bool:
    return heard(lines, number) == times


def ends_at_once(job: Job, code: int = 1) -> None:
    begun = time.monotonic()
    assert job.ends() == code, job.err
    assert time.monotonic() - begun < LONG, f"the grace was waited out\n{job.err}"
    assert "Traceback" not in job.err


def test_a_second_interrupt_kills_at_once(rallyrun: Launcher) -> None:
    number = signal.SIGINT
    job = start(rallyrun, [number.name], "--nproc-per-node=2")
    job.signal(number)
    job.until(lambda lines: heard(lines, number) == 2, "both workers have heard the first")
    job.signal(number)
    ends_at_once(job)
    assert "Killing the workers" in job.err
    assert heard(job.out, number) == 2, "the second is not for them"


def test_a_signal_while_the_rendezvous_is_incomplete_ends_the_agent(rallyrun: Launcher) -> None:
    nodes = [c10d(rallyrun, "2").start("A") for _ in ENDING]  # each of a job of its own
    for node in nodes:
        node.job.until_err("1 of 2 nodes have joined")
    for node, number in zip(nodes, ENDING, strict=True):
        node.job.signal(number)
        ends_at_once(node.job)
        assert f"stopped by {number.name}" in node.job.err
        assert node.ups == []


def test_interrupts_during_a_restart_end_the_agent(rallyrun: Launcher) -> None:
    job = start(rallyrun, ["SIGTERM", "SIGINT"], "--nproc-per-node=2", "--max-restarts=1")
    (rallyrun.folder / "fail-0").touch()
    job.until(lambda lines: heard(lines, signal.SIGTERM) == 1, "the other worker was asked to stop")
    job.signal(signal.SIGINT)
    job.until(lambda lines: heard(lines, signal.SIGINT) == 1, "the worker that stops has heard of the interrupt too")
    job.signal(signal.SIGINT)
    ends_at_once(job)
    assert sum(line.startswith("ready") for line in job.out) == 2, "nothing was started again"


def test_a_signal_that_only_tells_is_passed_on_and_ends_nothing(rallyrun: Launcher) -> None:
    telling = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH]
    names = [number.name for number in telling]
    job = start(rallyrun, names, "--nproc-per-node=2", f"--signals-to-handle=SIGTERM,{','.join(names)}")
    for time_ in (1, 2):
        for number in telling:
            job.signal(number)
            job.until(partial(_heard_so_often, number, 2 * time_), f"both have heard {number.name}, time {time_}")
    (rallyrun.folder / "finish").touch()
    ends_at_once(job, 0)


def test_under_a_scheduler_user_signals_to_all_processes_end_none(at_once: AtOnce) -> None:
    """What `scancel --signal=USR1` does: the helpers of the agent live on, and start what comes next."""
    at_once(*(partial(_user_signals_end_none, method=method) for method in ("script", "preloaded", "forkserver")))


def _user_signals_end_none(rallyrun: Launcher, *, method: str) -> None:
    body = WORKER.format(deaf=["SIGUSR1", "SIGUSR2"])
    flags = {"script": (), "preloaded": ("--preload=decimal",), "forkserver": ()}[method]
    if method == "forkserver":
        job = rallyrun.command([sys.executable, rallyrun.script(FORKSERVER.format(body=body))], env=SLURM)
    else:
        job = rallyrun("--standalone", "--max-restarts=1", *flags, rallyrun.script(body), env=SLURM)
    job.until(lambda lines: any(line.startswith("ready 0 0 ") for line in lines), "the worker is up")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        to_all(rallyrun, number)
        job.until(partial(_has_heard, number), f"it has heard {number.name}")
    (rallyrun.folder / "fail-0").touch()
    job.until(lambda lines: any(line.startswith("ready 0 1 ") for line in lines), "it was started again")
    (rallyrun.folder / "finish").touch()
    ends_at_once(job, 0)
    assert "lost" not in job.err
    assert "start without preloading" not in job.err


@pytest.mark.parametrize(("conf", "env"), [("notice_timeout=0", {}), (f"notice_timeout={LONG}", SLURM)])
def test_workers_that_a_scheduler_ends_have_not_failed(rallyrun: Launcher, conf: str, env: dict[str, str]) -> None:
    job = start(rallyrun, [], "--nproc-per-node=2", f"--rdzv-conf={conf}", env=env)
    to_all(rallyrun, signal.SIGTERM)
    ends_at_once(job)
    assert "stopped by SIGTERM" in job.err
    assert "failed" not in job.err.lower()


def test_a_worker_that_a_scheduler_ends_before_its_agent_has_not_failed(rallyrun: Launcher) -> None:
    job = start(rallyrun, [], env=SLURM)
    (ready,) = [line for line in job.out if line.startswith("ready")]
    worker = int(ready.split()[3])
    below = [pid for pid in rallyrun.pids() if pid not in (job.pid, worker)]
    for pid in (*below, worker):  # last: on a busy machine it has ended before the next one is sent the signal
        os.kill(pid, signal.SIGTERM)
    rallyrun.until_gone(worker)
    job.signal(signal.SIGTERM)
    ends_at_once(job)
    assert "failed" not in job.err.lower()


def test_a_worker_that_somebody_ends_has_failed(rallyrun: Launcher) -> None:
    job = start(rallyrun, [], env=SLURM)
    (ready,) = [line for line in job.out if line.startswith("ready")]
    os.kill(int(ready.split()[3]), signal.SIGTERM)
    ends_at_once(job)
    assert "(SIGTERM)" in job.err[job.err.index("Root Cause") :]


def test_a_handler_runs_once_where_a_scheduler_signals_all(rallyrun: Launcher) -> None:
    numbers = [signal.SIGUSR1, signal.SIGTERM]
    names = [number.name for number in numbers]
    job = start(rallyrun, names, "--nproc-per-node=2", env={**SLURM, "LOGLEVEL": "INFO"})
    for number in numbers:
        job.signal(signal.SIGSTOP)  # a scheduler is quicker than this test may be
        to_all(rallyrun, number)
        job.signal(signal.SIGCONT)
        job.until(partial(_heard_so_often, number, 2), f"both have heard {number.name}")
        job.until_err(f"{number.name} was sent to all processes")
    (rallyrun.folder / "finish").touch()
    ends_at_once(job)
    assert [heard(job.out, number) for number in numbers] == [2] * len(numbers), job.out


def test_a_worker_without_a_handler_is_told_of_that(rallyrun: Launcher) -> None:
    job = start(rallyrun, [], env=SLURM)
    to_all(rallyrun, signal.SIGUSR1)
    ends_at_once(job)
    assert "(SIGUSR1) received by PID" in job.err
    assert "which the agent passed on to its workers; this worker has no handler for it" in job.err


def stacks_are_shown_before_a_scheduler_kills_all(rallyrun: Launcher) -> None:
    env = {"RALLYPOINT_TERMINATION_GRACE": "2"}
    job = start(rallyrun, ["SIGTERM"], env=env)
    job.signal(signal.SIGTERM)
    ends_at_once(job)
    assert re.search(r"did not end within [1-9] s; sending SIGKILL", job.err)
    assert 'script.py", line' in job.err, "its stack"


def a_scheduler_that_ends_a_node_shortens_the_stop_that_runs(rallyrun: Launcher) -> None:
    env = {"RALLYPOINT_TERMINATION_GRACE": "2"}
    flags = ("--nproc-per-node=2", "--max-restarts=1", f"--rdzv-conf=failure_grace={LONG}")
    job = start(rallyrun, ["SIGTERM"], *flags, env=env)
    (rallyrun.folder / "fail-0").touch()
    job.until(lambda lines: heard(lines, signal.SIGTERM) == 1, "the other worker was asked to stop")
    job.signal(signal.SIGTERM)
    ends_at_once(job)


def a_notice_leaves_time_for_the_stop(rallyrun: Launcher) -> None:
    env = {"RALLYPOINT_TERMINATION_GRACE": "4"}
    job = start(rallyrun, ["SIGTERM"], f"--rdzv-conf=notice_timeout={LONG}", env=env)
    job.signal(signal.SIGTERM)
    job.until_err("the workers have 1 s to save and acknowledge")
    ends_at_once(job)
    assert re.search(r"did not end within [1-9] s; sending SIGKILL", job.err)


def test_a_short_time_from_a_scheduler_is_divided(at_once: AtOnce) -> None:
    at_once(
        stacks_are_shown_before_a_scheduler_kills_all,
        a_scheduler_that_ends_a_node_shortens_the_stop_that_runs,
        a_notice_leaves_time_for_the_stop,
    )


def test_without_a_scheduler_user_signals_mean_what_they_do_to_any_program(rallyrun: Launcher) -> None:
    job = start(rallyrun, [])
    job.signal(signal.SIGUSR1)
    assert job.ends() == -signal.SIGUSR1


def the_others_hear_of_a_departure_before_its_workers_are_gone(rallyrun: Launcher) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    flags = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=job", endpoint, f"--shutdown-timeout={LONG}")
    job = Nodes(rallyrun, *flags, "--rdzv-conf=last_call_timeout=1")
    host = job.host("host")
    body = WORKER.format(deaf=["SIGTERM"]).replace('"finish"', '"finish-leaver"')
    leaver = rallyrun(*flags, rallyrun.script(body, "deaf.py"))
    leaver.until(lambda lines: any(line.startswith("ready") for line in lines), "the worker that will stay is up")
    host.comes_up(1, world_size=2)
    leaver.signal(signal.SIGTERM)
    host.comes_up(1, starts=2, world_size=1)
    assert not any(line.startswith("done") for line in leaver.out), "it still saves"
    job.say("finish-leaver")
    assert leaver.ends() == 0
    assert leaver.err.count("Traceback") == 0
    job.say("finish")
    all_end([host], 0)


def a_node_that_leaves_in_order_ends_with_0(rallyrun: Launcher, *, ending: str) -> None:
    grace = 1 if ending == "never" else LONG  # who ends by itself may be slow to do so
    job = c10d(rallyrun, "1:2", f"--shutdown-timeout={grace}", conf="last_call_timeout=30")
    host = job.host("host")
    handlers = {"by SIGTERM": "", "by SIGINT": "", "never": "signal.signal(15, lambda *_: None)"}
    handler = handlers.get(ending, f"signal.signal(15, lambda *_: os._exit({ending}))")
    stays = "os.write(1, b'up\\n')\nwhile True: time.sleep(0.02)"  # a signal right before one sleep would not end it
    job.script = rallyrun.script(f"import os, signal, time\n{handler}\n{stays}", "l.py")
    leaver = job.start("leaver").job
    leaver.until(lambda lines: "up" in lines, "its worker is up")
    host.comes_up(1, world_size=2)
    leaver.signal(signal.SIGINT if ending == "by SIGINT" else signal.SIGTERM)
    in_order = ending in ("by SIGTERM", "143")
    assert leaver.ends() == (0 if in_order else 1), leaver.err
    assert ("left the job" in leaver.err) == in_order
    host.comes_up(1, starts=2, world_size=1)
    job.say("finish")
    all_end([host], 0)


def workers_that_start_after_a_departure_are_not_sent_the_signal_of_those_before(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "1:2", conf="last_call_timeout=30", env=SLURM)
    job.script = rallyrun.script(
        WORKER.format(deaf=["SIGTERM"]).replace('"finish"', '"finish-" + os.environ["WORLD_SIZE"]')
    )
    host = job.host("host").job
    leaver = job.start("leaver").job
    for each in (host, leaver):
        each.until(lambda lines: "ready" in " ".join(lines), "its worker is up")
    leaver.signal(signal.SIGTERM)
    host.until_err("left; restarting")
    (rallyrun.folder / "finish-2").touch()  # these end by themselves, before they are sent SIGTERM
    host.until(lambda lines: sum(line.startswith("ready") for line in lines) == 2, "the next worker is up")
    assert leaver.ends() == 0  # which takes a second
    (rallyrun.folder / "finish-1").touch()
    ends_at_once(host, 0)
    assert host.out[-1] == "done", "and has heard of nothing"


def test_departures_in_order(at_once: AtOnce) -> None:
    endings = ("by SIGTERM", "143")
    at_once(
        *(partial(a_node_that_leaves_in_order_ends_with_0, ending=ending) for ending in endings),
        the_others_hear_of_a_departure_before_its_workers_are_gone,
    )


def test_departures_in_disorder_and_of_workers_that_end_by_themselves(at_once: AtOnce) -> None:
    endings = ("never", "by SIGINT")
    at_once(
        *(partial(a_node_that_leaves_in_order_ends_with_0, ending=ending) for ending in endings),
        workers_that_start_after_a_departure_are_not_sent_the_signal_of_those_before,
    )


def test_a_job_that_ends_on_all_nodes_goes_on_nowhere(rallyrun: Launcher) -> None:
    """No worker ends before all agents have heard: one that hears late is left alone with the job by the others."""
    job = c10d(rallyrun, "1:3", conf="last_call_timeout=30")
    job.script = rallyrun.script(WORKER.format(deaf=["SIGTERM"]))
    nodes = [job.host("A"), job.start("B"), job.start("C")]
    for node in nodes:
        node.job.until(lambda lines: any(line.startswith("ready") for line in lines), "its worker is up")
    for node in nodes:
        node.job.signal(signal.SIGTERM)
    for node in nodes:
        node.job.until_err("ending the workers and leaving the job")
    job.say("finish")
    all_end(nodes, 1)


def test_who_hosts_the_control_plane_takes_it_along(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "1:2", conf="last_call_timeout=30")
    host, other = job.host("A"), job.start("B")
    all_up((host, other), world_size=2)
    host.job.signal(signal.SIGTERM)
    assert host.job.ends() == 1
    other.comes_up(1, starts=2, world_size=1)  # on this machine it can take the place of the host
    job.say("finish")
    all_end([other], 0)
