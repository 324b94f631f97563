"""Workers get a notice before they are stopped: for new nodes, and before their node is taken away."""

from __future__ import annotations

import signal

from tests.jobs.launching import AtOnce, Job, Launcher
from tests.jobs.launching import _settled as settled
from tests.jobs.nodes import c10d

WORKER = """
import os, signal, sys, time
from rallypoint import notices
node, count = os.environ["NODE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def stopped(*_):
    say("stopped after", "saving" if saved else "nothing")
    sys.exit(0)
seen, saved = None, False
signal.signal(signal.SIGTERM, stopped)
say("up", os.environ["WORLD_SIZE"])
while not os.path.exists("finish"):
    notice = notices.pending()
    if notice is not None and seen is None:
        seen = notice
        say("notice", notice.reason, notice.node or "self", notice.round, notice.remaining() > 0)
    if notice is None and seen is not None:
        seen = None
        say("no notice")
    if notice is not None and not saved and os.path.exists("save-" + node):
        saved = True
        say("saved")
        notices.acknowledge()
        notices.acknowledge()
    time.sleep(0.01)
say("done")
"""

LONG = "last_call_timeout=1,notice_timeout=50"
BOTH = "last_call_timeout=50,notice_timeout=50"
"""For a job of two that begins with both, however late the second comes."""


class Pair:
    """Agents whose workers tell what they see; one worker each."""

    def __init__(self, rallyrun: Launcher, nnodes: str, conf: str) -> None:
        self._rallyrun = rallyrun
        self._jobs = c10d(rallyrun, nnodes, conf=conf)
        (rallyrun.folder / "script.py").write_text(WORKER)

    def host(self) -> Job:
        return self._jobs.host("A").job

    def start(self, name: str) -> Job:
        return self._jobs.start(name).job

    def both_up(self) -> tuple[Job, Job]:
        """Both agents, in one round of two."""
        a, b = self.host(), self.start("B")
        for each in (a, b):
            hears(each, "up 2")
        return a, b

    def say(self, what: str) -> None:
        self._jobs.say(what)


def hears(job: Job, line: str, times: int = 1) -> None:
    job.until(lambda lines: sum(each.startswith(line) for each in lines) == times, f"{times} times {line!r}")


def new_nodes_are_taken_in_only_after_all_have_acknowledged(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "1:3", LONG)
    a = job.host()
    hears(a, "up 1")
    b = job.start("B")
    hears(a, "notice scale self 0 True")
    job.say("save-A")
    hears(a, "up 2")
    hears(b, "up 2")
    assert a.out == ["up 1", "notice scale self 0 True", "saved", "stopped after saving", "up 2"]
    c = job.start("C")
    for each in (a, b):
        hears(each, "notice scale self 1 True")
    hears(a, "saved", 2)  # B has not, so nothing ends
    assert "stopped" not in " ".join(b.out)
    job.say("save-B")
    for each in (a, b, c):
        hears(each, "up 3")
    job.say("finish")
    for each in (a, b, c):
        assert each.ends() == 0, each.err


def workers_that_never_acknowledge_are_stopped_at_the_deadline(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "1:2", "last_call_timeout=1,notice_timeout=4")
    a = job.host()
    hears(a, "up 1")
    b = job.start("B")
    for each in (a, b):
        hears(each, "up 2")
    assert a.out == ["up 1", "notice scale self 0 True", "stopped after nothing", "up 2"]
    job.say("finish")
    for each in (a, b):
        assert each.ends() == 0, each.err


def all_save_before_a_node_is_taken_away(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "1:2", BOTH)
    a, b = job.both_up()
    b.signal(signal.SIGTERM)
    hears(b, "notice preemption self 0 True")
    hears(a, "notice preemption")
    assert "notice preemption self" not in " ".join(a.out), "the others are told which node it is"
    b.signal(signal.SIGTERM)
    job.say("save-B")
    hears(b, "saved")
    assert "stopped" not in " ".join([*a.out, *b.out]), "A has not saved yet"
    job.say("save-A")
    assert b.ends() == 0
    assert b.out[-1] == "stopped after saving"
    hears(a, "up 1")
    assert "stopped after saving" in a.out
    job.say("finish")
    assert a.ends() == 0


def by_default_nobody_is_asked_but_a_termination_is_told(rallyrun: Launcher) -> None:
    script = rallyrun.script(WORKER.replace("SIGTERM, stopped", "SIGTERM, lambda *_: None"))
    job = rallyrun("--standalone", "--shutdown-timeout=50", script, env={"NODE": "A"})
    hears(job, "up 1")
    job.signal(signal.SIGTERM)
    hears(job, "notice preemption self 0 True")
    (rallyrun.folder / "finish").touch()
    assert job.ends() == 1
    assert job.out[-1] == "done", "it had the grace"


def no_notice_outlives_an_agent_that_is_killed(rallyrun: Launcher) -> None:
    job = Pair(rallyrun, "1:2", LONG)
    a = job.host()
    hears(a, "up 1")
    b = job.start("B")
    hears(a, "notice scale self 0 True")
    assert any("rallypoint-notices-" in path for path in rallyrun.left_files())
    a.signal(signal.SIGKILL)
    assert a.ends() == -signal.SIGKILL
    b.stop()  # the fixture finds what is left; here, that it was the reaper who took the notice away
    assert not settled(lambda: [path for path in rallyrun.left_files() if "rallypoint-notices-" in path])


def test_notices_for_new_nodes(at_once: AtOnce) -> None:
    at_once(
        new_nodes_are_taken_in_only_after_all_have_acknowledged,
        workers_that_never_acknowledge_are_stopped_at_the_deadline,
    )


def test_notices_for_a_node_that_is_taken_away(at_once: AtOnce) -> None:
    at_once(
        all_save_before_a_node_is_taken_away,
        by_default_nobody_is_asked_but_a_termination_is_told,
        no_notice_outlives_an_agent_that_is_killed,
    )
