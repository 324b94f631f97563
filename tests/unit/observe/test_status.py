"""The status of a job: JSON fields and their documentation, lines, changes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli.job_verbs import PHASE_CODES
from rallypoint.cli.local_jobs import OUTCOME_CODES, RunningJob, jobs_here_json
from rallypoint.control.membership.state import Reason
from rallypoint.control.protocol.messages import MissingNode, NodeReport
from rallypoint.features.kept_reports import KeptReport, RankEnd
from rallypoint.features.local_jobs import OUTCOMES, EndedJob
from rallypoint.observe.status import (
    ChangeLines,
    jobs_json,
    status_fields,
    status_json,
    status_lines,
)
from rallypoint.observe.watching.messages import (
    EventKind,
    JobList,
    JobPhase,
    JobSummary,
    MemberState,
    Snapshot,
    Straggler,
)
from rallypoint.rendezvous.handler import LocalJob
from tests.unit.observe.snapshots import event, node, snapshot

PAGE = (Path(__file__).parents[3] / "docs/reference/status.md").read_text()


def documented(title: str) -> list[tuple[str, str]]:
    """The fields of a section's table, and their types."""
    section = PAGE.partition(f"### {title}\n")[2].partition("\n##")[0]
    return re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", section, re.MULTILINE)


def fields(value: object, path: str = "") -> Iterator[str]:
    """All fields, like `nodes[].host`, with those of the first element of a list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{path}.{name}".lstrip(".")
            yield from fields(inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from fields(value[0], f"{path}[]")


def at(value: object, path: str) -> object:
    """The value at a path."""
    for name in path.replace("[]", ".0").split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]  # type: ignore[index]
    return value


SUMMARY = JobSummary("job", JobPhase.RUNNING, 1, 2, 3)
HERE = LocalJob(7, "job", "c10d", "node1:29400", "train.py", 1e9, 0)
ENDED = EndedJob(HERE, 1e9 + 5, "failed", "rank 0 failed", 2, 2, 3, "/logs")

REMOVED = (MissingNode("n7 (rank 2)", Reason.DEPARTED, 12.0, ended_with_0=True),)
PARTLY_ENDED = NodeReport(4, (10, 11), output_ages=(1.0, 1.0), steps=(7, 7), ended=((1, 0, 12.0),))
KEPT = KeptReport("node1", 2, True, ("report",), (RankEnd(0, 0, 8, 1, "failed", "", "", (), ("boom",)),))

KINDS = {"integer": int, "string": str, "boolean": bool, "object": dict, "list": list}


@pytest.mark.parametrize(
    ("title", "text"),
    [
        ("A job", status_json(snapshot(nodes=(node(0, report=PARTLY_ENDED), node(1)), removed=REMOVED), 1e9)),
        ("The jobs of a control plane", jobs_json(JobList((SUMMARY,), (SUMMARY,)), 1e9)),
        ("The jobs of this machine", jobs_here_json([RunningJob((HERE,), snapshot())], [ENDED], 1e9, [KEPT])),
    ],
    ids=["a job", "jobs", "jobs here"],
)
def test_fields_are_documented(title: str, text: str) -> None:
    seen, rows = json.loads(text), documented(title)
    assert sorted(name for name, _ in rows) == sorted(fields(seen))
    for name, kind in rows:
        found = at(seen, name)
        wanted = (int, float) if kind.startswith("number") else KINDS[kind.partition(" ")[0]]
        assert found is None or isinstance(found, wanted), name


def test_values_are_documented() -> None:
    words = set(re.findall(r"`([a-z_ ]+)`", PAGE))
    assert words >= {phase.value for phase in JobPhase}
    assert words >= {state.value for state in MemberState} | {"unreachable", "succeeded"}
    assert words >= {kind.value.replace(" ", "_") for kind in EventKind}


def test_exit_codes_are_documented() -> None:
    rows = re.findall(r"^\| (\d) \|", PAGE.partition("## Exit codes")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(map(int, rows)) == sorted({*PHASE_CODES.values(), 1, 2})
    assert set(PHASE_CODES) == {phase.value for phase in JobPhase}
    assert set(OUTCOME_CODES) == OUTCOMES


def snapshot_with(*steps: tuple[int, ...]) -> Snapshot:
    """A job whose workers report these steps."""
    return snapshot(nodes=tuple(node(number, report=NodeReport(4, steps=own)) for number, own in enumerate(steps)))


STANDBY = NodeReport(4, standby=(7, 8), standby_ready=1), NodeReport(4, standby=(9,), standby_ready=1)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            {"nodes": (node(0, report=NodeReport(4, in_place_of="torchrun")), node(1))},
            "launcher  rallyrun, in place of torchrun (rallyctl shim)",
        ),
        (
            {"phase": JobPhase.WAITING, "missing": 1, "removed": REMOVED},
            "n7 (rank 2): a node left 12s ago, all its ranks exited with code 0",
        ),
        ({"nodes": (node(0), node(1, drained_by="ann@login"))}, "participant, drained by ann@login"),
        ({"min_nodes": 9, "max_nodes": 9}, "nodes     2 (next round: min 9, max 9)"),
        (
            {"phase": JobPhase.WAITING, "nodes": 3, "missing": 2, "min_nodes": 4},
            "2 of 4 nodes in whole segments, 2 missing",
        ),
        (
            {"nodes": tuple(node(number, report=report) for number, report in enumerate(STANDBY))},
            "standby   2 of 3 workers ready",
        ),
    ],
)
def test_status_lines(fields: dict[str, Any], shown: str) -> None:
    assert shown in "\n".join(status_lines(snapshot(**fields), 200))


def test_optional_lines() -> None:
    optional = ("endpoint", "command", "logs", "last traceback", "launcher", "standby", "workers")
    assert not any(line.startswith(optional) for line in status_lines(snapshot()))
    traceback = "\n".join(["Traceback", *map(str, range(20)), "ValueError: boom"])
    failure = snapshot().failures[0]._replace(traceback=traceback)
    known = snapshot(age=3700.0, endpoint="node0:29400", failures=(failure,))
    known = known._replace(totals=known.totals._replace(command="rallyrun train.py", log_folder="/logs/job_n0"))
    lines = status_lines(known)
    assert {"age       1h01m", "endpoint  node0:29400", "command   rallyrun train.py"} <= {*lines}
    assert "logs      /logs/job_n0 on the node of rank 0" in lines
    first = lines.index("last traceback (rank 3 on n1)")
    assert lines[first + 1] == "  (10 more lines: --json)"
    assert lines[first + 13] == "  ValueError: boom"
    fields = status_fields(known, 1e9)
    shown = [fields[name] for name in ("age_seconds", "endpoint", "command")]
    assert shown == [3700.0, "node0:29400", "rallyrun train.py"]
    assert fields["failures"][0]["traceback"] == failure.traceback


def test_ended_and_blocked_workers() -> None:
    ended = ((0, 0, 12.0), (1, -9, 3.0))
    blocked = NodeReport(4, (10, 11), console_blocked=60.0, console_waiters=(0, 1), ended=ended)
    forming = NodeReport(4, (20, 21), ended=((0, 0, 70.0), (1, 0, 65.0)))
    nodes = (node(1, report=blocked), node(2, report=forming, first_rank=-1), node(3))
    lines = status_lines(snapshot(nodes=nodes))
    first = lines.index("workers")
    assert lines[first + 1 : first + 6] == [
        "  the console of n1 has not been read for 1m00s: ranks 2-3 are waiting for it",
        "  rank 3 on n1 ended with -9 (SIGKILL), 3.0s ago",
        "  rank 2 on n1 ended with 0, 12s ago",
        "  local ranks 0-1 on n2 ended with 0, the last 1m05s ago",
        "",
    ]
    pids = [line.split()[-2:] for line in lines if line.startswith(("1  ", "2  ", "3  "))]
    assert pids == [["-", "-"], ["-", "-"], ["30", "31"]]


def test_the_node_with_the_report() -> None:
    seen = snapshot(JobPhase.FAILED, detail="the job has failed")
    (lost,) = seen.failures[-1:]
    failed = lost._replace(rank=3, host="node3")
    line = f"report    on node3, with the last lines of its ranks: rallyctl status {seen.job}"
    assert line in status_lines(seen._replace(failures=(failed,)))
    for other in (failed._replace(rank=-1),), ():
        assert not any(shown.startswith("report") for shown in status_lines(seen._replace(failures=other)))
    assert line not in status_lines(snapshot(failures=(failed,)))


def test_domains() -> None:
    spare = node(1, state=MemberState.SPARE, group_rank=-1, waits_for="no whole segment in its domain (1 of 2 nodes)")
    lines = status_lines(snapshot(nodes=(node(0, domain="rack-7"), spare)))
    title = next(line for line in lines if line.startswith("RANK"))
    assert title.split()[:5] == ["RANK", "NODE", "ADDRESS", "DOMAIN", "STATE"]
    assert any("rack-7  participant" in line for line in lines)
    assert any("spare, waits: no whole segment in its domain (1 of 2 nodes)" in line for line in lines)
    assert "DOMAIN" not in "".join(status_lines(snapshot()))


def test_stragglers() -> None:
    seen = snapshot_with((120, 118), (120, 97), (120, -1))
    assert seen.totals.steps == (120, 5, 2, (Straggler(3, "n1 (rank 1)", 97, 23), Straggler(1, "n0 (rank 0)", 118, 2)))
    lines = status_lines(seen)
    at = lines.index("steps behind the median (120) of 5 ranks")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["RANK", "NODE", "STEP", "BEHIND"],
        ["3", "n1", "(rank", "1)", "97", "23"],
        ["1", "n0", "(rank", "0)", "118", "2"],
    ]
    (first, _) = status_fields(seen, 1e9)["stragglers"]["behind"]
    assert first == {"rank": 3, "node": "n1 (rank 1)", "step": 97, "behind": 23}


def test_many_and_no_stragglers() -> None:
    lines = status_lines(snapshot_with(*((step, 1000) for step in range(40)), (1000, 1000)))
    assert "  and 30 more" in lines
    assert len([line for line in lines if line.split()[-2:] == ["0", "1000"]]) == 1, "rank 0 is at step 0"
    for steps in (((7, -1), ()), ((), ()), ((5, 5), (5, 5)), ((5, 4), (5, 5))):
        assert not any("behind" in line for line in status_lines(snapshot_with(*steps)))
    assert status_fields(snapshot_with((7, -1), ()), 1e9)["stragglers"] is None
    assert status_fields(snapshot_with((5, 5)), 1e9)["stragglers"] == {"median_step": 5, "ranks": 2, "behind": []}


NOW = time.mktime((2026, 1, 2, 14, 3, 59, 0, 0, -1))


def changes(*snapshots: Snapshot) -> list[list[str]]:
    lines = ChangeLines()
    return [list(lines.lines(seen, NOW)) for seen in snapshots]


def test_changes_begin_with_the_present_state() -> None:
    later = snapshot(phase_for=90.0, nodes=2)._replace(nodes=(node(0, silent_for=2.0), node(1)))
    end = (*snapshot().events, event(3, "the job has stopped: ann stopped the job", seconds_ago=0.0))
    stopped = snapshot(JobPhase.STOPPED, events=end, detail="the job has stopped: ann stopped the job")
    assert changes(snapshot(), later, stopped) == [
        ["14:03:59 job job, round 4: running for 1m01s; restarts: 1 failure; 2 left"],
        [],
        ["14:03:59 the job has stopped: ann stopped the job"],
    ]


def test_changes_of_events_and_phases() -> None:
    news = (*snapshot().events, event(3, "round 4 ended: ann@login asks", seconds_ago=9.0))
    waiting = snapshot(JobPhase.WAITING, nodes=1, events=news, missing=1, expected=("n1 (rank 1)",), phase_for=9.0)
    joined = snapshot(JobPhase.FORMING, nodes=2, events=news, phase_for=9.0)
    lines = changes(snapshot(), waiting, waiting, joined)
    assert lines[1] == [
        "14:03:50 round 4 ended: ann@login asks",
        "14:03:59 waiting for 9.0s: 1 of 2 nodes, 1 missing (n1 (rank 1))",
    ]
    assert lines[2] == []
    assert lines[3] == ["14:03:59 forming for 9.0s: 2 of at most 4 nodes"]


def test_changes_of_another_coordinator() -> None:
    another = snapshot(incarnation="another", events=(event(1, "another coordinator took over"),))
    assert changes(snapshot(), another)[1] == ["14:03:58 another coordinator took over"]
