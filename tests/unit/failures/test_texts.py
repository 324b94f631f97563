"""Shortening the texts of failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.failures.texts import MAX_LINE, TRUNCATION_MARK, first_line, truncate, truncate_line

LIMIT = 16 * 1024


@given(st.lists(st.text(max_size=30), max_size=8), st.integers(1, 800), st.integers(200, LIMIT), st.text(max_size=2000))
def test_truncate(words: list[str], times: int, limit: int, place: str) -> None:
    text = "\n".join(word * times for word in words)
    short = truncate(text, limit, place)
    assert len(short.encode()) <= limit
    assert max(map(len, short.split("\n"))) <= MAX_LINE + 1200
    if len(text.encode()) <= limit and all(len(line) <= MAX_LINE for line in text.split("\n")):
        assert short == text


def test_truncate_a_long_line() -> None:
    text = "Traceback:\nValueError: " + "x" * 300_000 + "end"
    heading, word, line = truncate(text, LIMIT, "/logs/stderr.log on n3").split("\n")
    assert heading == "Traceback:"
    assert word == "[the next line is cut; all of it is in /logs/stderr.log on n3]"
    assert line == truncate_line(text.split("\n")[1])
    assert line.startswith("ValueError: xxx")
    assert line.endswith(f"{'x' * 97}end")
    assert len(line) == MAX_LINE


def test_truncate_many_lines() -> None:
    text = "\n".join(f"line {number}" for number in range(30_000))
    lines = truncate(text, LIMIT, "/logs/error.json on n3").split("\n")
    assert (lines[0], lines[-1]) == ("line 0", "line 29999")
    (word,) = [line for line in lines if line.startswith(TRUNCATION_MARK)]
    assert word == f"{TRUNCATION_MARK} at least 295 kB are cut here; all of it is in /logs/error.json on n3"
    before, after = lines.index(word), len(lines) - lines.index(word)
    assert 1.5 < after / before < 2.5
    assert len("\n".join(lines)) > LIMIT - 20


def test_the_last_line_does_not_depend_on_the_source() -> None:
    """Repeated failures are recognized by it."""
    for text in ("x" * 5000, "a\n" + "x" * 5000, "a\n" * 20_000 + "end"):
        first, second = (truncate(text, LIMIT, f"/logs/attempt_{number}") for number in (1, 2))
        assert first != second
        assert first.split("\n")[-1] == second.split("\n")[-1]


def test_first_line() -> None:
    assert first_line("\n  ValueError: a\nb\n") == "ValueError: a"
    assert first_line("") == ""
    assert len(first_line("x" * 5000)) == MAX_LINE
