"""Output is compared with what a page shows of it."""

from __future__ import annotations

import pytest

from tests.documents.compare import ends, masked


def same(shown: list[str], came: list[str], varies: str = "", *, any_order: bool = False) -> bool:
    return len(came) in ends(shown, came, varies, any_order=any_order)


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("0.13 s  2 workers: pids [1118, 1119]", "12.70 s  2 workers: pids [7, 23456]"),
        (
            "W1122 14:01:17.964185 99 rallypoint/agent/loop.py:87] round 0 is over",
            "W0103 09:59:00.000001 12345 rallypoint/agent/x/executor.py:1201] round 0 is over",
        ),
        ("W1122 14:01:17.964185 ... round 0 is over", "W0103 09:59:00.1 12 rallypoint/a.py:3] round 0 is over"),
        ("time : 2026-11-21_10:44:18", "time : 2027-01-02_01:02:03"),
        ("took 3 s", "took 0.25 s"),
        ("job 0f3a9c21 ended", "job 77ab12cd34 ended"),
        ("port 29400", "port 45113"),
        ("name    : x", "name : x  "),
        ("  indented", "    indented "),
    ],
)
def test_what_differs_from_run_to_run_is_masked(shown: str, came: str) -> None:
    assert same([shown], [came])


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("rank 1 of 2", "rank 1 of 4"),
        ("exit code -9", "exit code -7"),
        ("the job failed", "the job succeeded"),
        ("line 4", "line 5"),
        ("facade", "decade"),
    ],
)
def test_what_says_something_is_compared(shown: str, came: str) -> None:
    assert not same([shown], [came])


def test_three_dots_stand_for_any_lines() -> None:
    came = ["a", "b", "c", "d"]
    assert same(["a", "...", "d"], came)
    assert same(["a", "b", "...", "c", "d"], came)
    assert same(["..."], [])
    assert not same(["a", "...", "c"], came)
    assert not same(["b", "...", "d"], came)
    assert not same(["a", "d"], came)


def test_after_how_many_lines_all_that_is_shown_has_come() -> None:
    assert min(ends(["...", "b"], ["a", "b", "c", "b"])) == 2
    assert ends(["a", "x"], ["a", "b"]) == set()


def test_lines_in_any_order() -> None:
    assert same(["a 0", "a 1"], ["a 1", "a 0"], any_order=True)
    assert not same(["a 0", "a 1"], ["a 1", "a 1"], any_order=True)
    assert not same(["a 0"], ["a 0", "b"], any_order=True)
    assert not same(["a 0", "a 1"], ["a 0"], any_order=True)
    assert same(["...", "a 0", "a 1"], ["x", "a 1", "y", "a 0", "z"], any_order=True)


def test_a_page_can_say_what_else_differs() -> None:
    assert not same(["from step 60"], ["from step 7"])
    assert same(["from step 60"], ["from step 7"], r"step \d+")
    assert masked("step 7 of 9", r"step \d+") == "# of 9"
