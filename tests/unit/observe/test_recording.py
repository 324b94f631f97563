"""The report on a recorded run of 20 injected failures, compared with a count from the notes of that run.

Three agents, the hosts n0 to n2, had two workers each, which made a step every 0.1 s, saved every 40 steps and took
2.5 s to end. Workers were killed 17 times, agents three times (restarted after 20 s). The count uses `noted.json`:
the times of the kills, and the workers' own logs. `git log -- tests/unit/observe/recording/record.py` has the recorder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rallypoint.observe import site
from rallypoint.observe.goodput import JobActivity, Loss, Report, agent_runs, report
from rallypoint.observe.report import read_events, report_fields

RECORDING = Path(__file__).with_name("recording")
_SAVE_EVERY, _BACKOFF = 40, 5.0
_LIKE = 0.01
"""The tolerance of sums."""


class Counted(NamedTuple):
    """Seconds, from the notes."""

    wall: float
    running: float
    stopping: float
    held_back: float
    forming: float
    """Waiting for nodes and starting workers, which look the same from outside."""
    lost_work: float


@pytest.fixture(scope="module")
def noted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDING / "noted.json").read_text())
    return found


@pytest.fixture(scope="module")
def found() -> Report:
    files = read_events([str(RECORDING)])
    return report(agent_runs(files.events["recorded"]), files.notes)


def rounds_of(noted: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The workers of each round: six each, in the order of their start."""
    workers = sorted(noted["workers"], key=lambda worker: worker["start"])
    return [workers[at : at + 6] for at in range(0, len(workers), 6)]


def count(noted: dict[str, Any]) -> Counted:
    rounds, kills = rounds_of(noted), noted["kills"]
    begins = [max(worker["start"] for worker in workers) for workers in rounds]
    running = stopping = held_back = lost_work = 0.0
    forming = begins[0] - noted["began"]
    best = streak = 0
    for workers, begin, after, kill in zip(rounds, begins, begins[1:], kills, strict=False):
        end = kill["at"]
        running += end - begin
        steps = {step: at for worker in workers for step, at in reversed(worker["steps"])}
        saved = max(steps) // _SAVE_EVERY * _SAVE_EVERY
        first = min(steps)
        # Work since the last save is repeated; without a save, the whole round.
        since = (
            min(at for worker in workers for step, at in worker["steps"] if step == saved) if saved >= first else begin
        )
        lost_work += end - since
        streak = 0 if max(steps) > best else streak + 1
        best = max(best, *steps)
        delay = _BACKOFF * 2 ** (streak - 1) if streak else 0.0
        # A killed agent's workers are killed too; the others are asked to end, which takes time.
        stopped = max(worker["exit"] for worker in workers if "exit" in worker and "term" in worker)
        stopping += stopped - end
        held_back += max(0.0, end + delay - stopped)
        forming += after - max(stopped, end + delay)
    ended = max(worker["exit"] for worker in rounds[-1])
    return Counted(
        noted["ended"] - noted["began"],
        running + ended - begins[-1],
        stopping,
        held_back,
        forming,
        lost_work,
    )


def test_twenty_failures_were_injected(noted: dict[str, Any]) -> None:
    assert len(noted["kills"]) == 20
    assert [len(workers) for workers in rounds_of(noted)] == [6] * 21


@pytest.mark.parametrize("what", Counted._fields)
def test_sums(noted: dict[str, Any], found: Report, what: str) -> None:
    by_hand = getattr(count(noted), what)
    phases = found.phases
    sums = {
        "wall": found.wall,
        "running": phases[JobActivity.RUNNING],
        "stopping": phases[JobActivity.STOPPING],
        "held_back": phases[JobActivity.HELD_BACK],
        "forming": phases[JobActivity.RENDEZVOUS] + phases[JobActivity.STARTING],
        "lost_work": found.lost[Loss.LOST_WORK],
    }
    assert sums[what] == pytest.approx(by_hand, rel=_LIKE)


def test_restarts(noted: dict[str, Any], found: Report) -> None:
    restarts = [(restart.cause, restart.host) for restart in found.restarts]
    assert restarts == [("lost" if kill["kind"] == "agent" else "failure", kill["host"]) for kill in noted["kills"]]
    assert found.failures == 20
    assert found.outcome == "succeeded"
    assert found.mean_time_between_failures == pytest.approx(count(noted).running / 20, rel=_LIKE)
    assert [node.name for node in found.nodes] == ["n0", "n1", "n2"], "consecutive agents of one host"


def test_recoveries(noted: dict[str, Any], found: Report) -> None:
    begins = [max(worker["start"] for worker in workers) for workers in rounds_of(noted)]
    for entry, kill, after in zip(found.restarts, noted["kills"], begins[1:], strict=True):
        assert entry.recovery is not None
        assert entry.recovery.seconds == pytest.approx(after - kill["at"], abs=0.05)
        assert sum(entry.recovery.parts.values()) == pytest.approx(entry.recovery.seconds)


def test_the_events_of_one_node(found: Report) -> None:
    files = read_events([str(RECORDING / "n0.jsonl")])
    alone = report(agent_runs(files.events["recorded"]), files.notes)
    assert (
        "for round 0, only 1 of 3 nodes have events here; pass the files of all nodes to see the whole job"
        in alone.notes
    )
    assert alone.wall == pytest.approx(found.wall, rel=0.02)
    assert alone.productive == pytest.approx(found.productive, rel=0.05)
    assert [restart.cause for restart in alone.restarts] == [restart.cause for restart in found.restarts]


def test_fields_of_the_page(found: Report) -> None:
    page = Path(site.__file__).with_name("page.html").read_text()
    drawing = page[page.index("function showReport") : page.index("function tick")]
    fields = report_fields(found)
    assert {"began", "wall_seconds", "rounds", "nodes"} <= set(re.findall(r"\bmade\.(\w+)", drawing)) <= fields.keys()
    rounds = drawing[drawing.index("made.rounds.flatMap") : drawing.index("drawTimeline(")]
    of_rounds = set(re.findall(r"\bround\.(\w+)", rounds))
    assert {"started_seconds", "ended_seconds"} <= of_rounds <= fields["rounds"][0].keys()
