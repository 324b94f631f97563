"""The goodput report."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rallypoint.observe.goodput import JobActivity, Loss, Report, agent_runs, report
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import KINDS, NodePhase

R, H, S, RUN, STOP = (
    NodePhase.RENDEZVOUS,
    NodePhase.HELD_BACK,
    NodePhase.STARTING,
    NodePhase.RUNNING,
    NodePhase.STOPPING,
)


class Node:
    """Builds the events of an agent; `began` is the time of its own clock."""

    def __init__(self, host: str, began: float = 1000.0, pid: int = 1) -> None:
        self.host, self.began, self.pid = host, began, pid
        self.events: list[KINDS] = []
        self.round = -1
        self.add(events.AgentStarted, 0.0, role="r", program="p", backend="c10d", local_world_size=1, max_restarts=9)
        self.phase(0.0, R)

    def add(self, kind: type, at: float, **more: object) -> Node:
        common = {"time": self.began + at, "elapsed": at, "job": "j", "host": self.host, "pid": self.pid}
        self.events.append(kind(**common | {"round": self.round} | more))
        return self

    def phase(self, at: float, phase: NodePhase, held: float = 0.0) -> Node:
        return self.add(events.PhaseBegan, at, phase=phase, seconds=held)

    def placed(self, at: float, round_: int, nodes: int = 1, origin: str = "o") -> Node:
        self.round = round_
        more = {"group_rank": 0, "first_rank": 0, "local_world_size": 1, "restarts": 0, "max_restarts": 9}
        return self.add(events.RoundStarted, at, group_world_size=nodes, world_size=nodes, origin=origin, **more)

    def runs(self, at: float, round_: int, nodes: int = 1, starting: float = 0.0) -> Node:
        self.placed(at, round_, nodes).phase(at, S)
        return self.add(events.WorkersStarted, at + starting, pids=(1,)).phase(at + starting, RUN)

    def failed(self, at: float) -> Node:
        return self.add(events.WorkerFailed, at, failure=failure(self.host)).phase(at, STOP)

    def over(self, at: float, reason: str = "failure", host: str = "a") -> Node:
        more = {"failure": failure(host)} if reason == "failure" else {"node": f"{host} (rank 1)"}
        return self.add(events.RoundOver, at, reason=reason, **more)

    def step(self, at: float, step: int, first: int = -1, source: str = "call") -> Node:
        return self.add(events.ProgressMade, at, step=step, age=0.0, source=source, first_step=first)

    def ends(self, at: float, outcome: str = "succeeded") -> Node:
        self.add(events.JobOver, at, outcome=outcome).phase(at, STOP)
        return self.add(events.AgentEnded, at, outcome=outcome)


def failure(host: str) -> events.Failure:
    return events.Failure(rank=0, local_rank=0, host=host, pid=7, exit_code=1, message="boom")


def made(*nodes: Node) -> Report:
    found = report(agent_runs([event for node in nodes for event in node.events]))
    check(found)
    return found


def check(found: Report) -> None:
    """Check law 1, and that spans do not overlap."""
    assert sum(found.phases.values()) == pytest.approx(found.wall)
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.wall)
    assert min([found.productive, *found.lost.values(), *found.phases.values()]) >= -1e-6
    assert sum(span.seconds for span in found.timeline) == pytest.approx(found.wall)
    for spans in (found.timeline, *(node.spans for node in found.nodes)):
        assert all(before.end <= after.start + 1e-9 for before, after in itertools.pairwise(spans))
    assert all(0 <= entry.lost <= entry.running + 1e-6 for entry in found.rounds)


@st.composite
def any_events(draw: st.DrawFn) -> list[KINDS]:
    """Events of several agents in any order, at any time."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    found: list[KINDS] = []
    for number in range(draw(st.integers(1, 4))):
        node = Node(dice.choice("ab"), began=1000.0 + dice.uniform(0, 50), pid=number // 2)
        at, round_ = 0.0, 0
        for _ in range(draw(st.integers(0, 25))):
            at += dice.choice((0.0, dice.uniform(0, 10)))
            match dice.randrange(9):
                case 0 | 1 | 2:
                    node.phase(at, dice.choice(list(NodePhase)), dice.uniform(0, 20))
                case 3 | 4:
                    node.placed(at, round_, 2, dice.choice("op"))
                    round_ += dice.randrange(2)
                case 5:
                    node.over(at, dice.choice(("failure", "lost", "drained")))
                case 6:
                    node.step(at, dice.randrange(-1, 30), dice.randrange(-1, 30), dice.choice(("call", "call", "file")))
                case 7:
                    node.add(events.WorkersStarted, at, pids=(1,))
                case _:
                    node.failed(at)
        if dice.random() < 0.5:
            node.ends(at + dice.uniform(0, 5), dice.choice(("succeeded", "failed", "stopped")))
        found += node.events
    return found


@settings(deadline=None)
@given(any_events())
def test_sums_are_the_wall_time(found: list[KINDS]) -> None:
    check(report(agent_runs(found)))


def test_one_node() -> None:
    node = Node("a").runs(2.0, 0, starting=1.0).failed(10.0).over(10.0)
    node.phase(12.0, H, 3.0).runs(16.0, 1, starting=0.5).ends(20.5)
    found = made(node)
    assert {phase.value: seconds for phase, seconds in found.phases.items()} == pytest.approx(
        {"rendezvous": 3.0, "starting": 1.5, "running": 11.0, "stopping": 2.0, "held_back": 3.0, "down": 0.0}
    )
    assert found.wall == 20.5
    assert found.productive == 11.0, "no progress was reported"
    assert "no progress was reported" in found.notes[0]
    (restart,) = found.restarts
    assert (restart.cause, restart.host, restart.rank) == ("failure", "a", 0)
    assert restart.recovery is not None
    assert restart.recovery.seconds == 6.5
    assert restart.recovery.parts == {"stopping": 2.0, "held_back": 3.0, "rendezvous": 1.0, "starting": 0.5}
    assert (found.failures, found.mean_time_between_failures) == (1, 11.0)


def test_the_slowest_node_counts() -> None:
    a = Node("a").runs(1.0, 0, 2).failed(5.0).over(5.0).phase(6.0, R).runs(9.0, 1, 2).ends(15.0)
    b = Node("b").runs(1.0, 0, 2, starting=2.0).over(5.1).phase(5.1, STOP).phase(8.0, R).runs(9.0, 1, 2).ends(15.0)
    found = made(a, b)
    assert [(span.start, span.phase) for span in found.timeline] == [
        (0.0, "rendezvous"), (1.0, "starting"), (3.0, "running"), (5.0, "stopping"), (8.0, "rendezvous"),
        (9.0, "running"),
    ]  # fmt: skip


def test_spare_and_leaving_nodes_do_not_count() -> None:
    a = Node("a").runs(1.0, 0, 2).over(5.0, "departed", "b").phase(5.0, STOP).phase(6.0, R).runs(6.0, 1).ends(20.0)
    leaves = Node("b").runs(1.0, 0, 2).phase(5.0, STOP).add(events.AgentEnded, 15.0, outcome="left")
    spare = Node("c")
    spare.add(events.AgentEnded, 20.0, outcome="succeeded")
    found = made(a, leaves, spare)
    assert found.phases[JobActivity.STOPPING] == 1.0, "the leaving node's ends at 15"
    assert found.phases[JobActivity.RUNNING] == 18.0


def test_a_killed_agent() -> None:
    a = Node("a").runs(1.0, 0, 2).over(9.0, "lost", "b").phase(9.0, STOP).phase(9.5, R).runs(10.0, 1).ends(12.0)
    b = Node("b").runs(1.0, 0, 2)
    found = made(a, b)
    assert found.nodes[1].spans[-1].end == 9.0
    assert (found.restarts[0].cause, found.restarts[0].host) == ("lost", "b")
    assert "the events of b have no final event: killed" in found.notes


def test_a_requested_restart() -> None:
    node = Node("a").runs(1.0, 0).over(5.0, "requested", "me@h").phase(5.0, STOP).phase(6.0, R).runs(6.0, 1).ends(9.0)
    found = made(node)
    (restart,) = found.restarts
    assert (restart.cause, restart.host, restart.detail) == ("requested", "", "by me@h (rank 1)")
    assert (found.failures, found.restarts_by_host) == (0, {"-": 1})


def test_two_consecutive_agents() -> None:
    first = Node("a", 1000.0).runs(1.0, 0).step(8.0, 50, 1).add(events.AgentEnded, 10.0, outcome="failed")
    second = Node("a", 1060.0, pid=2).runs(2.0, 0).ends(10.0)
    second.events[2] = replace(second.events[2], origin="another")
    found = made(first, second)
    assert found.lost[Loss.DOWN] == 50.0
    assert [node.name for node in found.nodes] == ["a"], "consecutive agents of one host"
    assert len(found.rounds) == 2, "same number, other coordinator"
    assert found.lost[Loss.LOST_WORK] == pytest.approx(2.0)


@pytest.mark.parametrize("removed", [0, 1], ids=["", "without the first line of the second"])
@pytest.mark.parametrize("last_pid", [7, 8])
def test_a_restarted_pod(last_pid: int, removed: int) -> None:
    """Containers often reuse the process id."""
    first = Node("pod-0", 1000.0, pid=7).runs(1.0, 0).ends(100.0)
    second = Node("pod-0", 2000.0, pid=last_pid).runs(1.0, 0).ends(100.0)
    second.events[2] = replace(second.events[2], origin="another")
    second.events = second.events[removed:]
    found = made(first, second)
    assert (found.phases[JobActivity.RUNNING], found.lost[Loss.DOWN]) == (198.0, 900.0)
    names = [run.name for run in agent_runs([*first.events, *second.events])]
    assert names == (["pod-0 pid 7 run 1", "pod-0 pid 7 run 2"] if last_pid == 7 else ["pod-0 pid 7", "pod-0 pid 8"])


@pytest.mark.parametrize(("ahead", "words"), [(40.0, "ahead of"), (-40.0, "behind")])
def test_wrong_clocks_are_corrected(ahead: float, words: str) -> None:
    a = Node("a").runs(1.0, 0, 3).ends(10.0)
    b = Node("b", 1000.5 + ahead).runs(0.5, 0, 3).ends(9.5)
    c = Node("c", 1000.1).runs(0.9, 0, 3).ends(9.9)
    found = made(a, b, c)
    assert found.wall == pytest.approx(10.0, abs=0.2)
    assert found.notes[0] == f"the clock of b is 40.0 s {words} the others, and was corrected"


# Lost work


def lost(*rounds: Sequence[tuple[float, int, int]], source: str = "call", outcome: str = "succeeded") -> list[float]:
    """The lost seconds of rounds of ten seconds, given as times, steps and first steps."""
    node = Node("a")
    for number, steps in enumerate(rounds):
        node.runs(10.0 * number, number)
        for at, step, first in steps:
            node.step(10.0 * number + at, step, first, source)
        if number < len(rounds) - 1:
            node.failed(10.0 * (number + 1)).over(10.0 * (number + 1))
    return [round(entry.lost, 6) for entry in made(node.ends(10.0 * len(rounds), outcome)).rounds]


@pytest.mark.parametrize(
    ("rounds", "options", "expected"),
    [
        # 90 steps by second 9; the next round begins with step 71, so work after step 70, at second 7, is lost.
        ([[(1, 10, 1), (9, 90, 1)], [(1, 80, 71)]], {}, [3.0, 0.0]),
        ([[(1, 10, 1), (9, 90, 1)], [(1, 100, 91)]], {}, [1.0, 0.0]),  # only unreported work
        ([[(9, 90, 1)], [], [(1, 91, 91)]], {}, [1.0, 10.0, 0.0]),  # a round without progress
        ([[(1, 10, 1), (9, 90, 1)], [(1, 100, 91), (9, 180, 91)], [(1, 60, 51)]], {}, [5.0, 10.0, 0.0]),
        # With a progress file, its content survives.
        ([[(4, 1000, -1), (8, 2000, -1)], [(5, 3000, -1)]], {"source": "file"}, [2.0, 0.0]),
        ([[(4, -1, -1)], [(5, -1, -1)]], {"source": "file"}, [6.0, 0.0]),
        # The last round is lost unless the job succeeds.
        ([[(1, 10, 1)]], {"outcome": "failed"}, [9.0]),
        ([[(1, 10, 1)]], {"outcome": "stopped"}, [9.0]),
        ([[(1, 10, 1)]], {"outcome": "succeeded"}, [0.0]),
    ],
)
def test_lost_work(rounds: list[list[tuple[float, int, int]]], options: dict[str, str], expected: list[float]) -> None:
    assert lost(*rounds, **options) == expected
