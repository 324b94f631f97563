"""Ends of jobs, for schedulers and later readers: codes, verdicts, incident bundles, collapsed lines."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.jobs.launching import RALLYCTL, AtOnce, Launcher
from tests.jobs.nodes import all_end, all_up, c10d
from tests.jobs.test_steering import Operator, endpoint_of

CLASSIFIED = "--exit-codes=classified"


def verdict(folder: Path, node: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"verdict-{node}.json").read_text())
    return found


def told(folder: Path, node: str) -> dict[str, str]:
    """Where a node's verdict goes."""
    shown = folder / f"termination-{node}"
    shown.touch()
    return {
        "RALLYPOINT_VERDICT_FILE": str(folder / f"verdict-{node}.json"),
        "RALLYPOINT_TERMINATION_LOG": str(shown),
    }


def a_failure_is_the_same_on_both_nodes_and_kept_on_both(rallyrun: Launcher) -> None:
    folder = rallyrun.folder
    env = {"MY_API_TOKEN": "this-is-not-for-others", "RALLYPOINT_INCIDENT_ENV": "MY_*"}
    job = c10d(rallyrun, "2", CLASSIFIED, f"--incident-dir={folder / 'kept'}", "--tee=3", "--log-dir=logs", env=env)
    nodes = [job.host("A", env=told(folder, "A")), job.start("B", env=told(folder, "B"))]
    for node in nodes:
        node.job.until(_is_up, f"{node.name} is up")
    asked = rallyrun.command([*RALLYCTL, "bundle", f"127.0.0.1:{endpoint_of(nodes[0])}", "-o", str(folder / "asked")])
    assert asked.ends() == 0, asked.err
    assert "2 nodes in " in asked.out[0]
    job.say("fail-B-0")
    all_end(nodes, 1)
    for node in nodes:
        found = verdict(folder, node.name)
        assert (found["code"], found["ending"], found["job"]) == (1, "program", "job")
        assert "B fails in 0" in found["cause"]["traceback"]
        short = (folder / f"termination-{node.name}").read_bytes()
        assert len(short) <= 4096
        assert json.loads(short)["cause"]["rank"] == found["cause"]["rank"]
    for parent in (folder / "kept" / "job" / "round-0", *(folder / "asked" / "job").iterdir()):
        index = json.loads((parent / "index.json").read_text())
        assert len(index["folders"]) == 2
        assert index["status"]["job"] == "job"
        for node in nodes:
            (bundle,) = [each for each in parent.iterdir() if each.name.endswith(f"-{node.job.pid}")]
            summary = json.loads((bundle / "incident.json").read_text())
            assert summary["node"]["pid"] == node.job.pid
            (rank,) = summary["node"]["ranks"]
            assert f'"NODE": "{node.name}"' in (bundle / f"workers/rank_{rank}/stdout.txt").read_text()
            assert "MY_API_TOKEN='<masked>'" in (bundle / "environment.txt").read_text()
            kept = b"".join(each.read_bytes() for each in bundle.rglob("*") if each.is_file())
            assert b"this-is-not-for-others" not in kept
    failed = folder / "kept" / "job" / "round-0"
    assert all("B fails in 0" in (each / "failure.txt").read_text() for each in failed.iterdir() if each.is_dir())


def _is_up(lines: list[str]) -> bool:
    return any('"NODE"' in line for line in lines)


def a_stop_by_an_operator_is_94_on_all(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", CLASSIFIED)
    host = job.host("A")
    nodes = [host, job.start("B", env=told(rallyrun.folder, "B"))]
    all_up(nodes, world_size=2)
    assert Operator(rallyrun, f"127.0.0.1:{endpoint_of(host)}")("stop")[0] == 0
    all_end(nodes, 94)
    assert verdict(rallyrun.folder, "B")["ending"] == "stopped"


SAVES = """
import sys, time
from rallypoint.notices import acknowledge, pending
print("up", flush=True)
while pending() is None:
    time.sleep(0.02)
if "deaf" not in sys.argv:
    acknowledge()
time.sleep(60)
"""


def a_preemption_is_143_once_all_have_saved(rallyrun: Launcher) -> None:
    for word, seconds, code in (("saves", 30, 143), ("deaf", 1, 75)):
        script = rallyrun.script(SAVES)
        conf = f"--rdzv-conf=notice_timeout={seconds}"
        job = rallyrun("--standalone", CLASSIFIED, conf, script, word)
        job.until(lambda lines: "up" in lines, "the worker is up")
        job.signal(signal.SIGTERM)
        assert job.ends() == code, job.err


def equal_lines_are_shown_once(rallyrun: Launcher) -> None:
    script = rallyrun.script("import os\nprint('epoch 1')\nprint('I am', os.environ['RANK'])\nprint('epoch 2')\n")
    flags = ("--standalone", "--nproc-per-node=4", "--tee=1", "--tee-collapse=30", "--log-dir=logs")
    job = rallyrun(*flags, script)
    assert job.ends() == 0, job.err
    assert job.out.count("[0-3]: epoch 1") == job.out.count("[0-3]: epoch 2") == 1
    assert sorted(each for each in job.out if "I am" in each) == [f"[default{rank}]:I am {rank}" for rank in range(4)]
    assert len(job.out) == 6
    files = sorted((rallyrun.folder / "logs").glob("*/attempt_0/*/stdout.log"))
    assert [each.read_text() for each in files] == [f"epoch 1\nI am {rank}\nepoch 2\n" for rank in range(4)]


def test_endings(at_once: AtOnce) -> None:
    at_once(
        a_failure_is_the_same_on_both_nodes_and_kept_on_both,
        a_stop_by_an_operator_is_94_on_all,
        a_preemption_is_143_once_all_have_saved,
        equal_lines_are_shown_once,
    )


FAILS_AGAIN = """
import os, sys, time
time.sleep(float(sys.argv[1]))
round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if round < 3:
    raise SystemExit(f"failure {round}")
"""


def test_a_budget_in_a_window_ends_the_job_when_it_is_used_up(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--max-restarts=2/1h", rallyrun.script(FAILS_AGAIN), "0")
    assert job.ends() == 1
    assert "Restarts used: 2 of 2" in job.err


def test_a_failure_that_is_older_than_the_window_no_longer_counts(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--max-restarts=1/0.1s", rallyrun.script(FAILS_AGAIN), "0.15")
    assert job.ends() == 0
    assert job.err.count("restarting the workers") == 3
