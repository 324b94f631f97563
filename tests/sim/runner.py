"""Many seeds side by side, and their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from tests.sim.job import Result, run
from tests.sim.scenario import generate
from tests.sim.shrink import shrink, trace

_CHUNK = 100
_MOST_TRACES = 3
"""So many broken rules are shown with their whole trace."""


class Tally(NamedTuple):
    """What came of some seeds."""

    seeds: int
    steps: int
    seconds: float
    rounds: int
    faults: Counter[str]
    verdicts: Counter[str]
    fates: Counter[str]
    broken: tuple[tuple[str, int], ...]
    """Rule and seed."""


def add(tally: Tally, result: Result) -> Tally:
    """The tally with one more result in it."""
    scenario, violation = result.scenario, result.violation
    late = sum(1 for node in scenario.nodes if node.start > 2.0)
    return Tally(
        tally.seeds + 1,
        tally.steps + result.steps,
        tally.seconds + result.seconds,
        tally.rounds + result.rounds,
        tally.faults + Counter(fault.kind for fault in scenario.faults) + Counter({"late node": late}),
        tally.verdicts + Counter({result.verdict: 1}),
        tally.fates + result.fates,
        tally.broken if violation is None else (*tally.broken, (violation[0], scenario.seed)),
    )


def nothing() -> Tally:
    """The tally of no seeds."""
    return Tally(0, 0, 0.0, 0, Counter(), Counter(), Counter(), ())


def together(one: Tally, other: Tally) -> Tally:
    """Two tallies as one."""
    return Tally(
        one.seeds + other.seeds,
        one.steps + other.steps,
        one.seconds + other.seconds,
        one.rounds + other.rounds,
        one.faults + other.faults,
        one.verdicts + other.verdicts,
        one.fates + other.fates,
        one.broken + other.broken,
    )


def run_seeds(seeds: Iterable[int]) -> Tally:
    """Run these seeds, one after another."""
    tally = nothing()
    for seed in seeds:
        tally = add(tally, run(generate(seed)))
    return tally


def run_many(first: int, count: int, jobs: int) -> Tally:
    """Run seeds side by side."""
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    tally = nothing()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for each in pool.map(run_seeds, chunks):
            tally = together(tally, each)
    return tally


def summary(tally: Tally, elapsed: float) -> str:
    """The tally for a person to read."""
    lines = [
        f"{tally.seeds} seeds in {elapsed:.1f} s ({tally.seeds / elapsed:.0f} a second), {tally.steps} steps, "
        f"{tally.seconds / 3600:.1f} simulated hours, {tally.rounds} rounds",
        f"faults    {_told(tally.faults)}",
        f"verdicts  {_told(tally.verdicts)}",
        f"agents    {_told(tally.fates)}",
    ]
    by_rule: dict[str, list[int]] = {}
    for rule, seed in tally.broken:
        by_rule.setdefault(rule, []).append(seed)
    for rule, seeds in sorted(by_rule.items(), key=lambda entry: -len(entry[1])):
        lines.append(f"BROKEN    {rule}: {len(seeds)} seeds: {', '.join(map(str, seeds[:8]))}")
    lines.append("no rule was broken" if not by_rule else f"{len(by_rule)} rules were broken")
    return "\n".join(lines)


def traces(tally: Tally) -> str:
    """The smallest trace of the first seed for each of a few rules."""
    first: dict[str, int] = {}
    for rule, seed in tally.broken:
        first.setdefault(rule, seed)
    told = [
        f"\n=== {rule}\nreplay: python -m tests.sim --seed {seed}; cut down, it goes like this:\n"
        + trace(shrink(run(generate(seed))))
        for rule, seed in list(first.items())[:_MOST_TRACES]
    ]
    return "\n".join(told)


def _told(counter: Counter[str]) -> str:
    return ", ".join(f"{name.lower()} {count}" for name, count in sorted(counter.items()))
