"""Drills: victims, refusals, outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rallypoint.control.membership.state import Ledger
from rallypoint.control.protocol.messages import Fault, NodeReport
from rallypoint.observe.drills import (
    Begun,
    Drill,
    DrillRefused,
    Trial,
    Victim,
    choose,
    drill_fields,
    is_passed,
    is_settled,
    outcome,
    sentence,
    trial_lines,
    victims,
)
from rallypoint.observe.watching.messages import EventKind, JobEvent, JobPhase, NodeView, Snapshot
from tests.unit.observe.snapshots import node, snapshot

TEXT = "ann@login drills kill worker: rank 3 on n1 (rank 1)"
VICTIM = Victim("n1 (rank 1)", "7@n1", 3)
WORKERS = [fault for fault in Fault if fault.is_of_worker]
NODES = [fault for fault in Fault if not fault.is_of_worker]


def job(nodes: int = 3, **fields: Any) -> Snapshot:
    """A job whose node 0 hosts the control plane."""
    rows = [node(number, **({"silent_for": -1.0} if number == 0 else {})) for number in range(nodes)]
    return snapshot(nodes=rows, **{"max_restarts": 30, **fields})


def at(seconds_ago: float, kind: EventKind, number: int, round_: int = 4, text: str = "") -> JobEvent:
    return JobEvent(number, seconds_ago, kind, round_, text)


FAULT = at(10.0, EventKind.DRILL, 3, text=TEXT)


def begun(fault: Fault = Fault.KILL_WORKER, before: Snapshot | None = None, **fields: Any) -> Begun:
    return Begun(Drill(fault, **fields), 1, VICTIM, TEXT, before or reporting(progress=8, first_step=1))


def result(started: Begun, seen: Snapshot) -> Trial:
    done = outcome(started, seen)
    assert done is not None
    return done


def reporting(round_: int = 4, events: Sequence[JobEvent] = (), failures: int = 1, **fields: Any) -> Snapshot:
    """A job whose two nodes send the same report."""
    nodes = [node(number, report=NodeReport(round_, (1, 2), **fields)) for number in range(2)]
    return snapshot(nodes=nodes, round=round_, events=tuple(events), ended_rounds=Ledger(failures))


# Victims


@given(st.sampled_from(Fault), st.integers(), st.integers(1, 50), st.integers(2, 6))
def test_the_seed_determines_the_victims(fault: Fault, seed: int, number: int, nodes: int) -> None:
    drill = Drill(fault, times=50, seed=seed, forced=True)
    chosen = choose(drill, number, job(nodes))
    assert chosen == choose(drill, number, job(nodes))
    assert chosen in victims(drill, job(nodes))


@pytest.mark.parametrize("fault", WORKERS)
def test_any_worker_can_be_the_victim(fault: Fault) -> None:
    chosen = {choose(Drill(fault, seed=seed, forced=True), 1, job()).rank for seed in range(100)}
    assert chosen == set(range(6))


@pytest.mark.parametrize("fault", NODES)
def test_the_control_plane_s_node_is_spared(fault: Fault) -> None:
    chosen = {choose(Drill(fault, seed=seed, forced=True), 1, job()).node for seed in range(100)}
    assert chosen == {view.name for view in job().nodes if fault is Fault.PAUSE_NODE or view.group_rank}
    if fault is not Fault.PAUSE_NODE:
        with pytest.raises(DrillRefused, match="hosts the control plane"):
            choose(Drill(fault, node="n0", forced=True), 1, job())


@given(st.sampled_from(WORKERS), st.integers(0, 5))
def test_a_given_rank(fault: Fault, rank: int) -> None:
    chosen = choose(Drill(fault, rank=rank), 1, job())
    assert (chosen.rank, chosen.node) == (rank, f"n{rank // 2} (rank {rank // 2})")


@pytest.mark.parametrize("name", ["n1", "n1 (rank 1)", "10.0.0.1", "7@n1", "1"])
def test_a_given_node(name: str) -> None:
    assert choose(Drill(Fault.KILL_AGENT, node=name), 1, job()).key == "7@n1"
    for drill in (Drill(Fault.KILL_WORKER, rank=6), Drill(Fault.CUT, node="n9")):
        with pytest.raises(DrillRefused):
            choose(drill, 1, job())


@given(st.data())
def test_only_connected_nodes_are_victims(data: st.DataObject) -> None:
    rows: list[NodeView] = [
        node(number, connected=data.draw(st.booleans()), succeeded=data.draw(st.booleans())) for number in range(4)
    ]
    well = {view.name for view in rows if view.connected and not view.succeeded}
    for fault in Fault:
        assert {victim.node for victim in victims(Drill(fault), snapshot(nodes=rows))} == well


# Refusals


@given(st.sampled_from(Fault), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(2, 5))
def test_drills_that_would_end_the_job(fault: Fault, times: int, used: int, most: int, nodes: int) -> None:
    seen = job(nodes, max_restarts=most, ended_rounds=Ledger(used))
    needed = {Fault.KILL_WORKER: times, Fault.KILL_AGENT: 1, Fault.HANG: 1}.get(fault, 0)
    takes_node = fault in {Fault.KILL_AGENT, Fault.KILL_NODE}
    fits = most - used >= needed and (not takes_node or nodes - 1 >= seen.min_nodes)
    drill = Drill(fault, times)
    if fits:
        choose(drill, 1, seen)
    else:
        with pytest.raises(DrillRefused, match="--force"):
            choose(drill, 1, seen)
    choose(drill._replace(forced=True), 1, seen)


@given(st.integers(1, 9))
def test_each_kill_needs_a_restart(done: int) -> None:
    seen = job(max_restarts=10, ended_rounds=Ledger(done))
    choose(Drill(Fault.KILL_WORKER, times=10), done + 1, seen)


def test_a_spare_replaces_a_killed_node() -> None:
    seen = job(2)
    with pytest.raises(DrillRefused, match="leaves 1 node, but the job needs 2"):
        choose(Drill(Fault.KILL_NODE), 1, seen)
    choose(Drill(Fault.KILL_NODE), 1, seen._replace(totals=seen.totals._replace(spare=1)))


@given(st.sampled_from(Fault), st.sampled_from([*{*JobPhase} - {JobPhase.RUNNING}]), st.booleans())
def test_only_running_jobs_are_drilled(fault: Fault, phase: JobPhase, forced: bool) -> None:
    with pytest.raises(DrillRefused):
        choose(Drill(fault, forced=forced), 1, job(phase=phase))


# Outcomes


def killed(**fields: Any) -> Snapshot:
    """A worker was killed ten seconds ago, and the next round began seven seconds ago."""
    events = [FAULT, at(9.5, EventKind.ROUND_ENDED, 4), at(7.0, EventKind.ROUND_STARTED, 5, round_=5)]
    return reporting(5, events, failures=2, **fields)


def test_a_killed_worker() -> None:
    done = outcome(begun(), killed(progress=47, first_step=41, first_step_age=3.0, step_before=57))
    assert done == Trial(1, Fault.KILL_WORKER, VICTIM, True, 0.5, 3.0, 7.0, True, "progress", restarts=1, lost=17)


@given(st.integers(-1, 100), st.integers(0, 100))
def test_lost_steps(before: int, first: int) -> None:
    done = result(begun(), killed(progress=first, first_step=first, first_step_age=1.0, step_before=before))
    assert done.lost == (None if before < 0 else len(range(first, before + 1)))


def test_all_nodes_must_make_a_step() -> None:
    seen = killed(progress=47, first_step=41, first_step_age=3.0, step_before=57)
    late = seen.nodes[1]._replace(report=NodeReport(5, (1, 2)))
    assert outcome(begun(), seen._replace(nodes=(seen.nodes[0], late))) is None
    alone = reporting(progress=8, first_step=1)
    alone = alone._replace(nodes=(alone.nodes[0], alone.nodes[1]._replace(report=NodeReport(4, (1, 2)))))
    assert result(begun(before=alone), seen._replace(nodes=(seen.nodes[0], late))).survived, (
        "one node made steps before"
    )


def test_output_is_an_upper_bound() -> None:
    before = reporting(output_ages=(1.0, -1.0))
    assert outcome(begun(before=before), killed(output_ages=(8.0, 9.9))) is None, "output of the previous round"
    done = result(begun(before=before), killed(output_ages=(2.0, 1.0)))
    assert (done.survived, done.step, done.is_exact, done.seen_by, done.lost) == (True, 8.0, False, "output", None)


def test_jobs_without_progress_or_output() -> None:
    done = result(begun(before=reporting()), killed())
    assert (done.survived, done.step, done.round) == (True, None, 3.0)
    assert "report no progress" in sentence([done])


@pytest.mark.parametrize("seconds_ago", [1.0, 119.0])
def test_undetected_faults(seconds_ago: float) -> None:
    seen = reporting(events=[FAULT._replace(seconds_ago=seconds_ago)], progress=9, progress_age=0.1)
    assert outcome(begun(), seen) is None


@pytest.mark.parametrize(("fault", "what"), [(Fault.HANG, "not detected"), (Fault.CUT, "no step")])
def test_timeouts(fault: Fault, what: str) -> None:
    before = reporting(progress=8, first_step=1)
    seen = reporting(events=[FAULT._replace(seconds_ago=120.1)], progress=9, progress_age=121.0)
    done = result(begun(fault, before), seen)
    assert not done.survived
    assert what in done.note


@given(st.floats(0.0, 9.0), st.floats(0.0, 12.0))
def test_pauses_end_with_the_next_step(lasts: float, age: float) -> None:
    assume(abs(10.0 - age - lasts) > 1e-6)
    before = reporting(progress=8, first_step=1)
    seen = reporting(events=[FAULT], progress=9, progress_age=age)
    done = outcome(begun(Fault.PAUSE_WORKER, before, lasts=lasts), seen)
    assert (done is not None) == (10.0 - age > lasts)
    if done is not None:
        assert (done.survived, done.detected, done.is_exact, done.lost) == (True, None, False, 0)
        assert done.step == pytest.approx(10.0 - age)


def test_a_cut_node_must_reconnect() -> None:
    before = reporting(progress=8, first_step=1)
    seen = reporting(events=[FAULT], progress=9, progress_age=1.0)
    silent = seen._replace(nodes=(seen.nodes[0], seen.nodes[1]._replace(silent_for=9.0)))
    cut = Begun(Drill(Fault.CUT, lasts=2.0), 1, VICTIM._replace(rank=-1), TEXT, before)
    assert outcome(cut, silent) is None
    assert result(cut, seen).survived


def test_hangs_end_with_the_next_step() -> None:
    before = reporting(progress=8, first_step=1)
    events = [FAULT, at(4.0, EventKind.HANG_FOUND, 4)]
    hung = reporting(events=events, progress=8, progress_age=10.0)
    drill = begun(Fault.HANG, before, lasts=120.0)
    assert outcome(drill, hung) is None
    done = result(drill, reporting(events=events, progress=9, progress_age=3.5))
    assert (done.survived, done.detected, done.step) == (True, 6.0, 6.5)


@pytest.mark.parametrize(
    ("phase", "survived"), [(JobPhase.FAILED, False), (JobPhase.STOPPED, False), (JobPhase.SUCCEEDED, True)]
)
def test_the_end_of_the_job(phase: JobPhase, survived: bool) -> None:
    done = result(begun(), killed()._replace(phase=phase, detail=f"the job has {phase.value}"))
    assert (done.survived, done.note) == (survived, f"the job has {phase.value}")


def test_earlier_drills_with_the_same_text() -> None:
    before = reporting(events=[FAULT], first_step=1)
    seen = killed(progress=47, first_step=41, first_step_age=3.0)
    assert outcome(begun(before=before), seen) is None


# Texts


def trial(number: int, step: float | None, **fields: Any) -> Trial:
    made = Trial(number, Fault.KILL_WORKER, VICTIM, True, 0.1, 0.4, step, seen_by="progress", restarts=1, lost=3)
    return made._replace(**fields)


def test_trial_lines_and_sentence() -> None:
    trials = [trial(1, 1.5), trial(2, 9.1), trial(3, 1.8)]
    assert trial_lines(trials)[:3] == [
        "#  FAULT        ON                     DETECTED  ROUND   STEP    RESTARTS  STEPS LOST",
        "1  kill worker  rank 3 on n1 (rank 1)  0.10 s    0.40 s  1.50 s  1         3",
        "2  kill worker  rank 3 on n1 (rank 1)  0.10 s    0.40 s  9.10 s  1         3",
    ]
    assert sentence(trials) == (
        "3 of 3 survived; median 1.80 s; the slowest, rank 3 on n1 (rank 1), took 9.10 s: "
        "0.10 s until it was detected, 0.30 s until the next round, 8.70 s until its first step; 9 steps lost in total"
    )
    bound = trial(1, 2.5, is_exact=False, detected=None, round=None)
    assert "<= 2.50 s" in trial_lines([bound])[1]
    assert "median at most 2.50 s" in sentence([bound])


def test_failed_drills() -> None:
    lost = trial(2, None, survived=False, note="there was no step within 120 s", lost=None)
    text = sentence([trial(1, 1.5), lost], "no restart is left")
    assert text.startswith(
        "1 of 2 survived; the job did not survive fault 2 (rank 3 on n1 (rank 1)): there was no step within 120 s"
    )
    assert text.endswith("no more faults were tried: no restart is left")


@given(st.lists(st.booleans(), max_size=5), st.integers(1, 5))
def test_is_passed(survived: list[bool], times: int) -> None:
    trials = [trial(number, 1.0, survived=one) for number, one in enumerate(survived, 1)]
    drill = Drill(Fault.KILL_WORKER, times)
    assert is_passed(drill, trials) == (len(survived) == times and all(survived))
    assert drill_fields(drill, "job", trials, "")["succeeded"] == is_passed(drill, trials)


def test_surviving_workers_report_no_first_step() -> None:
    """Only a new worker does; without one, the last step is an upper bound."""
    seen = killed(progress=60, progress_age=2.0, step_before=57)
    newcomer = seen.nodes[1]._replace(
        report=NodeReport(5, (1, 2), progress=60, progress_age=2.0, first_step=58, first_step_age=4.0, step_before=57)
    )
    done = result(begun(), seen._replace(nodes=(seen.nodes[0], newcomer)))
    assert (done.step, done.is_exact, done.lost) == (6.0, True, 0)
    done = result(begun(), seen)
    assert (done.step, done.is_exact, done.lost) == (8.0, False, None)


@pytest.mark.parametrize(
    ("report", "settled"),
    [
        (NodeReport(4), True),
        (NodeReport(4, progress=9), True),
        (NodeReport(4, progress=9, step_before=7), True),
        (NodeReport(4, step_before=7), False),
        (None, False),
    ],
)
def test_is_settled(report: NodeReport | None, settled: bool) -> None:
    assert is_settled(snapshot(nodes=[node(0), node(1, report=report)])) == settled
