"""Seeds keep every rule; the same seed has the same trace; planted bugs are found; scenarios can be cut down."""

from __future__ import annotations

import os
import sys

import pytest

from rallypoint.agent.steps import FeatureStep, Step
from rallypoint.features.preemption.rules import RequeueJob
from tests.effort import examples
from tests.processes import completed
from tests.sim.agent import Agent
from tests.sim.job import run
from tests.sim.mutations import BUGS, Mutation, find_mutation
from tests.sim.scenario import FIRST_WITH_DOMAINS, WITH_DOMAINS_EVERY, generate
from tests.sim.shrink import shrink, trace

_ONCE_BROKEN = (234238403, 185563802, 710003030, 710034290, 381196004, 893816377, 730009602, 1000371, 840002673)
"""Seeds that broke a rule when they were new; the defects are mended."""
_SEEDS, _SEEDS_WITH_DOMAINS = 200, 60
_TEETH = 1_000


def test_seeds_keep_every_rule() -> None:
    """The same seeds for the same commit; `python -m tests.sim`, which `make test-all` runs too, draws its own."""
    with_domains = range(FIRST_WITH_DOMAINS, FIRST_WITH_DOMAINS + examples(_SEEDS_WITH_DOMAINS) * WITH_DOMAINS_EVERY)
    for seed in (*range(examples(_SEEDS)), *_ONCE_BROKEN, *with_domains[::WITH_DOMAINS_EVERY]):
        result = run(generate(seed))
        if result.violation is not None:
            pytest.fail(f"replay: python -m tests.sim --seed {seed} --shrink\n{trace(shrink(result))}", pytrace=False)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_planted_bugs_are_found(bug: Mutation) -> None:
    """A bug counts as found when a seed breaks a rule with it and none without it."""
    found = find_mutation(bug, start=bug.found_by, most=1) or find_mutation(bug, start=0, most=_TEETH)
    assert found is not None, f"{bug.what}: not found within {_TEETH} seeds"
    print(f"{bug.what}: found after {found.seeds} seeds, by seed {found.seed}: {found.rule}")


@pytest.mark.process
def test_a_seed_has_the_same_trace_whatever_the_hash_seed() -> None:
    seeds = range(40)
    told = [trace(generate(seed)) for seed in seeds]
    assert told == [trace(generate(seed)) for seed in seeds]
    program = (
        "from tests.sim.scenario import generate\nfrom tests.sim.shrink import trace\n"
        f"import sys\nsys.stdout.write('|'.join(trace(generate(seed)) for seed in range({len(seeds)})))"
    )
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        ran = completed([sys.executable, "-c", program], env=environment, check=True)
        assert ran.stdout == "|".join(told)


def test_a_failing_scenario_is_cut_down() -> None:
    """What is left breaks the same rule, and nothing can be left out of it."""
    bug = next(bug for bug in BUGS if "clock" in bug.what)
    found = find_mutation(bug, start=bug.found_by, most=_TEETH)
    assert found is not None
    with bug.plant():
        result = run(generate(found.seed))
        smallest = shrink(result)
        again = run(smallest)
    assert again.violation is not None
    assert again.violation[0] == found.rule
    assert [fault.kind for fault in smallest.faults] == ["clock-jump"]
    assert len(smallest.nodes) <= len(result.scenario.nodes)


def test_every_step_of_the_policy_is_known_to_the_simulated_agent() -> None:
    assert set(Agent._HOW) == {*Step.__args__, RequeueJob} - {FeatureStep}
