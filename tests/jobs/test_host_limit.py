"""`--host-failure-limit`: a node whose workers fail too often leaves the job, and the others continue."""

from __future__ import annotations

from tests.jobs.launching import Launcher
from tests.jobs.nodes import all_end, all_up, c10d

LEFT = "this node is leaving the job: its workers failed"


def test_a_spare_takes_the_place_of_a_node_that_has_failed_too_often(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", "--max-restarts=5", "--host-failure-limit=2")
    a, b = job.host("a"), job.start("b")
    all_up([a, b])
    spare = job.start("c")
    job.say("fail-b-0")
    all_up([a, b], 2, world_size=2)
    assert LEFT not in b.job.err
    job.say("fail-a-1")
    all_up([a, b], 3, world_size=2)
    job.say("fail-b-2")
    assert b.job.ends() == 1
    assert f"{LEFT} 2 times (--host-failure-limit)" in b.job.err
    spare.comes_up(1, world_size=2)
    job.say("finish")
    all_end([a, spare], 0)
    assert LEFT not in a.job.err


def test_the_others_go_on_without_it(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "1:2", "--max-restarts=5", "--host-failure-limit=1", conf="last_call_timeout=2")
    a, b = job.host("a"), job.start("b")
    all_up([a, b], world_size=2)
    job.say("fail-b-0")
    assert b.job.ends() == 1
    assert f"{LEFT} once" in b.job.err
    a.job.until(lambda lines: a.ups[-1]["WORLD_SIZE"] == "1", "it runs alone")
    job.say("finish")
    all_end([a], 0)


def test_a_job_without_another_node_ends(rallyrun: Launcher) -> None:
    script = rallyrun.script("raise SystemExit(3)")
    job = rallyrun("--standalone", "--max-restarts=9", "--host-failure-limit=2", "--rdzv-conf=retry_all=true", script)
    assert job.ends() == 1
    assert f"{LEFT} 2 times" in job.err
