"""Turns: each side once a round, in order; a side that fails is left out and says why."""

from __future__ import annotations

import time

from benchmarks.errors import BenchError
from benchmarks.turns import in_turn


def test_sides_take_turns_and_the_warm_up_is_thrown_away() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    turns = in_turn("it", 2, {"a": lambda: side("a"), "b": lambda: side("b")}, warm_up=True)
    assert calls == ["a", "b"] * 3
    assert turns.results == {"a": [3, 5], "b": [4, 6]}
    assert turns.remarks() == ()


def test_a_side_that_fails_is_left_out_with_its_reason() -> None:
    calls: list[str] = []

    def failing() -> int:
        calls.append("a")
        if len(calls) == 2:
            raise BenchError("it fell over")
        return 1

    turns = in_turn("it", 4, {"a": failing, "b": lambda: 2})
    assert calls == ["a", "a"]
    assert turns.results == {"a": [], "b": [2, 2, 2, 2]}
    assert turns.remarks() == ("a not measured: it fell over",)


def test_a_side_that_has_taken_enough_time_keeps_what_it_has() -> None:
    turns = in_turn("it", 3, {"a": lambda: time.sleep(0.02), "b": lambda: None}, enough=0.02)
    assert turns.results == {"a": [None], "b": [None] * 3}
    assert turns.remarks() == ("a measured in 1 of 3 rounds",)
