"""`--node-check`: a node whose check fails takes no part, and nothing is left of a check, however it ends."""

from __future__ import annotations

import re
import signal

import pytest

from tests.jobs.launching import AtOnce, Launcher
from tests.jobs.nodes import all_end, all_up, c10d

UP = "print('up', flush=True)\n"
SLEEPS = "(trap '' TERM; sleep 1000) & (setsid sleep 1000 &) ; echo waits; sleep 1000"
"""A check that hangs, with a child that does not mind SIGTERM and one in a session of its own."""
CLASSIFIED_TRY_AGAIN = 75


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("echo one; echo two >&2; exit 3", "ended with exit code 3; its last output: one / two;"),
        ("sleep 1000 & kill -SEGV $$", "was killed by SIGSEGV;"),
    ],
)
def test_a_node_whose_check_fails_takes_no_part(rallyrun: Launcher, check: str, words: str) -> None:
    job = rallyrun("--standalone", "--exit-codes=classified", f"--node-check={check}", rallyrun.script(UP))
    assert job.ends() == CLASSIFIED_TRY_AGAIN, job.err
    assert not job.out
    (line,) = job.err.split("\n")
    assert line.startswith(f"rallyrun: error: this node will not join: the node check {check!r} "), line
    assert words in line
    assert line.endswith("; fix the node, then restart its agent")
    assert len(line) < 800
    assert not rallyrun.left(), "nothing of the check is there when the agent has ended"


def test_a_check_that_passes_is_seen_in_the_log_only(at_once: AtOnce) -> None:
    def quietly(rallyrun: Launcher) -> None:
        job = rallyrun("--standalone", "--node-check=echo fine; sleep 1000 &", rallyrun.script(UP))
        assert job.ends() == 0, job.err
        assert (job.out, job.err) == (["up"], "")

    def logged(rallyrun: Launcher) -> None:
        check = "cat; printf 'fine\\nwhole'; exec >&- 2>&-; sleep 0.3"  # there is no input to wait for
        job = rallyrun("--standalone", rallyrun.script(UP), env={"LOGLEVEL": "INFO", "PET_NODE_CHECK": check})
        assert job.ends() == 0, job.err
        own = [line.partition("] ")[2] for line in job.err.split("\n") if "node_check.py" in line]
        assert own[1:3] == ["[node check] fine", "[node check] whole"]
        assert re.search(r"passed in \d+\.\d s$", own[3])
        assert job.err.index("[node check] whole") < job.err.index("Rendezvous'ing worker group")

    at_once(quietly, logged)


def test_a_check_that_hangs_is_ended_in_time(at_once: AtOnce) -> None:
    def hangs(rallyrun: Launcher) -> None:
        job = rallyrun("--standalone", f"--node-check={SLEEPS}", "--node-check-timeout=6", rallyrun.script(UP))
        assert job.ends() == 1, job.err
        assert "did not end within 6 s (--node-check-timeout); its last output: waits;" in job.err
        assert not rallyrun.left()

    def writes_without_end(rallyrun: Launcher) -> None:
        job = rallyrun("--standalone", "--node-check=yes", "--node-check-timeout=6", rallyrun.script(UP))
        assert job.ends() == 1, job.err
        assert "did not end within 6 s (--node-check-timeout); its last output: y / y / y;" in job.err

    def is_lost_with_its_agent(rallyrun: Launcher) -> None:
        job = rallyrun("--standalone", f"--node-check={SLEEPS}", rallyrun.script(UP), env={"LOGLEVEL": "INFO"})
        job.until_err("[node check] waits")
        job.signal(signal.SIGKILL)
        job.ends()

    at_once(hangs, writes_without_end, is_lost_with_its_agent)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_a_signal_ends_the_check_and_the_agent(rallyrun: Launcher, numbers: tuple[signal.Signals, ...]) -> None:
    deaf = "trap 'echo deaf' TERM INT; echo waits; while true; do sleep 1000; done"
    flags = ["--standalone", f"--node-check={deaf if len(numbers) > 1 else SLEEPS}"]
    job = rallyrun(*flags, rallyrun.script(UP), env={"LOGLEVEL": "INFO"})
    job.until_err("[node check] waits")
    for number in numbers:
        job.signal(number)
        job.until_err("ending the workers and leaving the job")
    assert job.ends() == 1, job.err
    assert f"stopped by {numbers[0].name}" in job.err
    assert ("Killing the workers" in job.err) == (len(numbers) > 1)
    assert not job.out
    assert not rallyrun.left()


def test_a_node_is_checked_again_after_a_failure_of_its_own(at_once: AtOnce) -> None:
    check = "--node-check=echo >>checked-$NODE; test ! -e unfit-$NODE"

    def checks(rallyrun: Launcher, name: str) -> int:
        return len((rallyrun.folder / f"checked-{name}").read_text())

    def comes_back(rallyrun: Launcher) -> None:
        job = c10d(rallyrun, "2", "--max-restarts=1", check)
        nodes = [job.host("a"), job.start("b")]
        all_up(nodes)
        job.say("fail-b-0")
        all_up(nodes, 2, world_size=2)
        job.say("finish")
        all_end(nodes, 0)
        assert [checks(rallyrun, "a"), checks(rallyrun, "b")] == [1, 2]
        assert "this node will be checked before it rejoins" in nodes[1].job.err
        assert "is checked before" not in nodes[0].job.err

    def stays_out(rallyrun: Launcher) -> None:
        job = c10d(rallyrun, "2:3", "--max-restarts=1", check, conf="last_call_timeout=20")
        nodes = [job.host("a"), job.start("b"), job.start("c")]
        all_up(nodes)
        job.say("unfit-c")
        job.say("fail-c-0")
        assert nodes[2].job.ends() == 1
        assert "this node will not join: the node check 'echo >>checked-$NODE; " in nodes[2].job.err
        all_up(nodes[:2], 2, world_size=2)
        job.say("finish")
        all_end(nodes[:2], 0)
        assert [checks(rallyrun, name) for name in "abc"] == [1, 1, 2]

    def never_joins(rallyrun: Launcher) -> None:
        job = c10d(rallyrun, "1:2", check, conf="last_call_timeout=1")
        host = job.host("a")
        host.comes_up(1, world_size=1)
        job.say("unfit-b")
        assert job.start("b").job.ends() == 1
        job.say("finish")
        all_end([host], 0)
        assert len(host.ups) == 1, "the round that runs was not disturbed"

    at_once(comes_back, stays_out, never_joins)
