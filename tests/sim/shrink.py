"""The smallest scenario that still breaks the same rule: leaves out nodes and faults while that is so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tests.sim.job import Result, run
from tests.sim.scenario import FailureRates, Scenario

T = TypeVar("T")
Runs = Callable[[Scenario], Result]

_MOST_RUNS = 600
"""A scenario that is still large after so many runs stays as it is."""


def shrink(result: Result, runs: Runs = run) -> Scenario:
    """The smallest scenario found that breaks the same rule as `result`."""
    assert result.violation is not None, "nothing was broken"
    rule, smallest, left = result.violation[0], result.scenario, _MOST_RUNS

    def breaks(scenario: Scenario) -> bool:
        nonlocal left
        left -= 1
        violation = runs(scenario).violation
        return violation is not None and violation[0] == rule

    found = True
    while found and left > 0:
        found = False
        for candidate in _smaller(smallest):
            if left <= 0:
                break
            if breaks(candidate):
                smallest, found = candidate, True
                break
    return smallest


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less in them, the much smaller ones first."""
    for faults in _fewer(scenario.faults):
        yield scenario._replace(faults=faults)
    for nodes in _fewer(scenario.nodes):
        if len(nodes) >= scenario.min_nodes:
            left = {node.number for node in nodes}
            faults = tuple(fault for fault in scenario.faults if fault.node in left or fault.node < 0)
            yield scenario._replace(nodes=nodes, faults=faults)
    for simpler in _simpler(scenario):
        if simpler != scenario:
            yield simpler


def _fewer(things: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    size = len(things)
    while size:
        for start in range(0, len(things), size):
            yield things[:start] + things[start + size :]
        size //= 2


def _simpler(scenario: Scenario) -> Sequence[Scenario]:
    calm_temper = FailureRates(scenario.temper.shortest, scenario.temper.longest, 0.0, 0.0, 0.0)
    return (
        scenario._replace(temper=calm_temper),
        scenario._replace(temper=scenario.temper._replace(infects=0.0)),
        scenario._replace(notice_timeout=0.0),
        scenario._replace(backoff=0.0),
        scenario._replace(abandoned=False),
        scenario._replace(min_nodes=1),
        scenario._replace(nodes=tuple(node._replace(size=1) for node in scenario.nodes)),
        scenario._replace(nodes=tuple(node._replace(resumable=False) for node in scenario.nodes)),
    )


def trace(scenario: Scenario) -> str:
    """The scenario and all that happened in it, for a person to read."""
    result = run(scenario, tracing=True)
    settings = ", ".join(
        f"{name}={value}" for name, value in scenario._asdict().items() if name not in ("nodes", "faults")
    )
    lines = [f"seed {scenario.seed}: {settings}"]
    lines += [f"  {node}" for node in scenario.nodes]
    lines += [f"  {fault}" for fault in scenario.faults]
    lines += result.trace
    lines.append(
        f"{result.seconds:9.4f}  VIOLATION {result.violation[1]}"
        if result.violation is not None
        else "no rule was broken"
    )
    return "\n".join(lines)
