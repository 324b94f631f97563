"""The fast half of the corpus under rallyrun: the cause is right, and nothing is left of the job."""

from __future__ import annotations

import pytest

from tests.causes.case import Case
from tests.causes.cases import CASES, OPEN
from tests.causes.reading import Score, answer, score
from tests.causes.running import PROGRAMS, imports, missing, run


def _parameter(case: Case) -> object:
    marks = [pytest.mark.torch] if imports(case) else []
    marks += [pytest.mark.xfail(reason=OPEN[case.name], raises=AssertionError)] if case.name in OPEN else []
    return pytest.param(case, marks=marks, id=case.name)


@pytest.mark.parametrize("case", [_parameter(case) for case in CASES if case.fast])
def test_the_report_names_the_cause(case: Case) -> None:
    if reason := missing(case):
        pytest.skip(f"THE CAUSE {case.name} WAS NOT TESTED: {reason}")
    outcome = run(case, "rallyrun")
    if outcome.left:
        pytest.fail(f"it has left {outcome.left}")  # no AssertionError: nothing excuses it
    assert outcome.score is Score.RIGHT, "\n".join(outcome.consoles)


def test_the_table_and_the_programs_fit() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert OPEN.keys() <= set(names)
    programs = {path.stem for path in PROGRAMS.glob("[!_]*.py")}
    assert programs <= {case.program for case in CASES}
    assert not [case.name for case in CASES if case.fast and case.by_chance]


REPORT = """\
W1128 17:05:15.552988 7 rallypoint/agent/actions.py:369] Sending process 9 closing signal SIGTERM
ValueError: what the worker has written
============
train.py FAILED
------------
Failures:
  <NO_OTHER_FAILURES>
------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  traceback : Traceback (most recent call last):
    KeyError: 'the cause'
============
"""


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("", "", ("KeyError: 'the cause'",), 1), Score.RIGHT),
        (Case("", "", ("KeyError: 'the cause'",), 0), Score.WRONG),
        (Case("", "", ("KeyError: 'the cause'",), 1, never=("ValueError",)), Score.RIGHT),
        (Case("", "", ("OSError",), 1, never=("KeyError",)), Score.WRONG),
        (Case("", "", ("NO_OTHER", "KeyError"), 1, never=("KeyError",)), Score.WRONG),
        (Case("", "", ("OSError",), 1), Score.SILENT),
        (Case("", "", ("ValueError",)), Score.SILENT),
    ],
)
def test_a_report_is_judged(case: Case, expected: Score) -> None:
    assert score(case, answer(REPORT, 7)) is expected


def test_silence_and_lines_are_judged() -> None:
    case = Case("", "", ("rank 1 has ended",))
    assert score(case, answer("rank 1 has ended\n", 7)) is Score.SILENT
    assert score(case, answer("W1128 17:05:15.5 8 a.py:1] rank 1 has ended\n", 7)) is Score.SILENT
    assert score(case, answer("W1128 17:05:15.5 7 a.py:1] ranks:\n  rank 1 has ended\n", 7)) is Score.RIGHT
    assert score(case, answer("RuntimeError: Timed out waiting 4000ms\n", 7)) is Score.SILENT
