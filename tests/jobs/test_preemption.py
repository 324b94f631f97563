"""Jobs preempted as a whole: after a signal to one node, or at the end of the job's time, all save and end."""

from __future__ import annotations

import os
import re
import signal

from tests.jobs.launching import AtOnce, Job, Launcher
from tests.jobs.nodes import c10d
from tests.ports import free_port
from tests.processes import below

WORKER = """
import os, signal, sys, time
from rallypoint import notices
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
ignored = signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
seen = False
say("up", os.environ["WORLD_SIZE"], "ignores" if ignored else "hears")
while not os.path.exists("finish"):
    notice = notices.pending()
    if notice is not None and not seen:
        seen = True
        say("notice", notice.reason, 30 < notice.remaining() <= 60)  # this worker may come to it some seconds later
        for what in os.environ["DOES"].split():
            if what == "save":
                say("saved")  # before the acknowledgement, after which it may be stopped at any moment
                notices.acknowledge()
            elif what == "wait":
                while not os.path.exists("go"):
                    time.sleep(0.01)
            elif what == "exit":
                sys.exit(0)
    time.sleep(0.01)
say("done")
"""
FLAGS = ("--preempt-signals=SIGUSR2", "--shutdown-timeout=20")
SENTENCE = r"rallyrun: the job was preempted, since [^\n]* received SIGUSR2; "


class Pair:
    """Two agents of one job, one worker each."""

    def __init__(
        self, rallyrun: Launcher, *does: str, flags: tuple[str, ...] = (), conf: str = "", worker: str = WORKER
    ) -> None:
        options = ",".join(filter(None, ("last_call_timeout=50", conf)))
        nodes = c10d(rallyrun, "2", *FLAGS, *flags, conf=options)
        (rallyrun.folder / "script.py").write_text(worker)
        self._nodes, self._does = nodes, " ".join(does)
        self.a, self.b = nodes.host("A", env={"DOES": self._does}).job, self._start("B")
        for each in (self.a, self.b):
            each.until(lambda lines: "up 2 ignores" in lines, "a worker is up that ignores the signal")

    def _start(self, name: str) -> Job:
        return self._nodes.start(name, env={"DOES": self._does}).job

    def ends(self, code: int = 143) -> tuple[str, str]:
        """Both end so. Returns what they have printed."""
        for each in (self.a, self.b):
            assert each.ends() == code, each.err
            assert "Root Cause" not in each.err
            assert "Traceback" not in each.err
        return self.a.err, self.b.err


def one_signal_to_one_node_ends_both_after_all_have_saved(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "save")
    job.b.signal(signal.SIGUSR2)
    for err in job.ends():
        assert len(re.findall(SENTENCE + "all workers of this node have saved$", err, re.MULTILINE)) == 1
    for each in (job.a, job.b):
        assert each.out == ["up 2 ignores", "notice preemption True", "saved"]


def who_does_not_answer_is_waited_for_to_the_end_of_its_time(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, conf="notice_timeout=1", flags=("--exit-codes=classified",))
    job.a.signal(signal.SIGUSR2)
    for err in job.ends():
        assert re.search(SENTENCE + "not all workers of this node have saved$", err, re.MULTILINE)
        assert "not all workers on this node acknowledged in time" in err


def who_acknowledges_and_exits_has_not_finished(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "save", "exit")
    job.a.signal(signal.SIGUSR2)
    job.ends()


def who_finishes_within_the_time_has_succeeded(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "exit")
    job.a.signal(signal.SIGUSR2)
    assert "preempted, since" not in "".join(job.ends(0))


def the_loss_of_the_node_that_was_told_changes_nothing(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "wait", "save")
    job.b.signal(signal.SIGUSR2)
    job.a.until(lambda lines: len(lines) == 2, "the notice is there")
    job.b.signal(signal.SIGKILL)
    assert job.b.ends() == -signal.SIGKILL
    (rallyrun.folder / "go").touch()
    assert job.a.ends() == 143
    assert re.search(SENTENCE, job.a.err)


def sigterm_itself_may_preempt_the_job(rallyrun: Launcher) -> None:
    script = rallyrun.script(WORKER.replace("SIGUSR2", "SIGTERM"))
    flags = ("--standalone", "--preempt-signals=SIGTERM", "--signals-to-handle=SIGINT", "--shutdown-timeout=50")
    job = rallyrun(*flags, script, env={"DOES": "save"})
    job.until(lambda lines: "up 1 hears" in lines, "a worker is up that can be stopped")
    job.signal(signal.SIGTERM)
    assert job.ends() == 143, "which would take 50 s if the worker ignored it"
    assert job.out[-1] == "saved"


def a_worker_that_the_signal_ends_before_its_agent_has_it_cuts_no_other_node_short(rallyrun: Launcher) -> None:
    """A scheduler signals every process of a node, whose worker has a handler that exits; the other node's saves."""
    exits = WORKER.replace(
        "seen = False",
        "seen = os.environ['NODE'] == 'B' and bool(signal.signal(signal.SIGUSR2, lambda *_: os._exit(7)))",
    )
    job = Pair(rallyrun, "save", flags=("--max-restarts=3",), worker=exits)
    for pid in below(job.b.pid):
        os.kill(pid, signal.SIGUSR2)
    _, err = job.ends()
    assert "saved" in job.a.out
    assert "failed (exitcode: 7)" in err


def all_that_share_a_file_are_told(rallyrun: Launcher) -> None:
    (rallyrun.folder / "script.py").write_text(WORKER)
    meet = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={rallyrun.folder}/s"]
    a, b = (rallyrun(*meet, "--rdzv-id=job", *FLAGS, "script.py", env={"DOES": "save"}) for _ in range(2))
    for each in (a, b):
        each.until(lambda lines: "up 2 ignores" in lines, "a worker is up")
    b.signal(signal.SIGUSR2)
    for each in (a, b):
        assert each.ends() == 143, each.err
        assert each.out[-1] == "saved"


def static_nodes_too(rallyrun: Launcher) -> None:
    (rallyrun.folder / "script.py").write_text(WORKER)
    meet = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    a, b = (rallyrun(*meet, f"--node-rank={rank}", *FLAGS, "script.py", env={"DOES": "save"}) for rank in range(2))
    for each in (a, b):
        each.until(lambda lines: "up 2 ignores" in lines, "a worker is up")
    a.signal(signal.SIGUSR2)
    for each in (a, b):
        assert each.ends() == 143, each.err


def test_a_signal_to_one_node_ends_the_job(at_once: AtOnce) -> None:
    at_once(
        one_signal_to_one_node_ends_both_after_all_have_saved,
        who_does_not_answer_is_waited_for_to_the_end_of_its_time,
        the_loss_of_the_node_that_was_told_changes_nothing,
        sigterm_itself_may_preempt_the_job,
        a_worker_that_the_signal_ends_before_its_agent_has_it_cuts_no_other_node_short,
    )


def test_what_workers_do_with_the_notice_decides(at_once: AtOnce) -> None:
    at_once(
        who_acknowledges_and_exits_has_not_finished,
        who_finishes_within_the_time_has_succeeded,
    )


def test_however_the_nodes_meet(at_once: AtOnce) -> None:
    at_once(all_that_share_a_file_are_told, static_nodes_too)
