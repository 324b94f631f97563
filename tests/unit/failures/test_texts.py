"""Texts of failures: what is found in standard error, and how texts are cut."""

from __future__ import annotations

import subprocess
import sys
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.failures.texts import (
    MAX_LINE,
    TRUNCATION_MARK,
    clean_lines,
    exception_line,
    first_line,
    is_last_traceback,
    is_traceback,
    last_lines,
    last_traceback,
    truncate,
    truncate_line,
)

WORDS = st.text(alphabet="abc: é", min_size=1, max_size=10).filter(str.strip)


def _raised(depth: int, words: str, how: str) -> str:
    """What Python prints for a chain of `depth` exceptions."""
    try:
        if depth:
            try:
                raise KeyError(words)
            except KeyError as first:
                if how == "cause":
                    raise ValueError(words) from first
                raise ValueError(words)  # noqa: B904 - the chain by context is what is wanted
        raise ValueError(words)
    except ValueError as error:
        return "".join(traceback.format_exception(error))


def _stderr_of(code: str) -> bytes:
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False, timeout=60).stderr


@given(
    depth=st.integers(0, 1),
    words=WORDS,
    how=st.sampled_from(["cause", "context"]),
    before=st.lists(WORDS),
    after=st.lists(WORDS),
    mark=st.sampled_from(["", "[rank0]: "]),
)
def test_a_traceback_is_found_among_other_lines(
    depth: int, words: str, how: str, before: list[str], after: list[str], mark: str
) -> None:
    text = _raised(depth, words, how).rstrip("\n")
    shown = "\n".join(mark + line if line else line for line in text.split("\n"))
    stderr = "\n".join([*before, shown, "", *after, ""])
    expected = "\n".join(line.rstrip() for line in text.split("\n")).rstrip()
    found = last_traceback(clean_lines(stderr.encode()))
    assert found == expected
    assert is_traceback(found)
    assert exception_line(found) == f"ValueError: {words}".rstrip()


@given(st.binary(max_size=300) | st.text(alphabet="T\n\r \x1b[m", max_size=60).map(str.encode))
def test_no_bytes_are_an_exception(data: bytes) -> None:
    lines = clean_lines(data)
    last_traceback(lines)
    last_lines(lines)
    assert not any("\r" in line or "\n" in line for line in lines)


THREAD = "import threading\nt = threading.Thread(target=lambda: 1/0); t.start(); t.join()\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "line", "kept", "left_out"),
    [
        (
            "import traceback\ntry: 1/0\nexcept ZeroDivisionError: traceback.print_exc()\nraise ValueError('last')",
            *("ValueError: last", "ValueError: last", "ZeroDivisionError"),
        ),
        (
            "class A:\n  def __del__(self): raise KeyError('noise')\na = A()\nraise ValueError('cause')",
            *("ValueError: cause", "ValueError: cause", "noise"),
        ),
        (THREAD, *("ZeroDivisionError: division by zero", "ZeroDivisionError", "ValueError")),
        (
            f"import atexit\natexit.register(exec, {THREAD!r})\nraise ValueError('cause')",
            *("ValueError: cause", "ValueError: cause", "ZeroDivisionError"),
        ),
        (
            "raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])",
            *("ExceptionGroup: several (2 sub-exceptions)", "KeyError: 'two'", "[...]"),
        ),
    ],
    ids=[
        "the last of several",
        "one at exit is ignored",
        "a thread's",
        "a thread's and a better one",
        "a group is whole",
    ],
)
def test_which_exception_counts(code: str, line: str, kept: str, left_out: str) -> None:
    found = last_traceback(clean_lines(_stderr_of(code)))
    assert exception_line(found) == line
    assert kept in found
    assert left_out not in found


def test_a_marked_message_goes_on_behind_a_blank_line() -> None:
    stderr = b"[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: E: one\n\n[rank0]: two\nnoise\n"
    assert last_traceback(clean_lines(stderr)) == "Traceback (most recent call last):\n  File\nE: one\n\ntwo"


def test_colours_and_overwritten_text_are_left_out() -> None:
    stderr = b"\n\x1b[1;31mred\x1b[0m\r\n 10%\r 20%\r\n\x1b]0;title\x07plain\n\n"
    assert clean_lines(stderr) == ["red", " 20%", "plain"]
    coloured = b"\x1b[35mTraceback (most recent call last):\x1b[0m\n  File\n\x1b[1mE\x1b[0m: x\n"
    assert last_traceback(clean_lines(coloured)) == "Traceback (most recent call last):\n  File\nE: x"


def test_without_a_traceback_there_is_none() -> None:
    assert last_traceback(clean_lines(b"just\nwords\n")) == ""
    assert last_traceback(clean_lines(b"")) == ""
    assert last_lines([str(number) for number in range(100)]) == "\n".join(str(number) for number in range(70, 100))


def test_a_traceback_whose_heading_is_lost_is_one_all_the_same() -> None:
    frame = '  File "x.py", line 1, in f\n    f()\n    ^^^\n'
    kept = f"rror, in g\n    g()\n{frame}{frame}RecursionError: too deep\n"
    found = last_traceback(clean_lines(kept.encode()))
    assert found == f"Traceback (most recent call last):\n  [...]\n{frame}{frame}RecursionError: too deep"
    assert exception_line(found) == "RecursionError: too deep"
    assert last_traceback(clean_lines((frame + frame).encode())) == ""
    assert last_traceback(clean_lines(("word\n" * 9 + frame + "end").encode())) == ""


LIMIT = 16 * 1024


@given(st.lists(st.text(max_size=30), max_size=8), st.integers(1, 800), st.integers(200, LIMIT), st.text(max_size=2000))
def test_it_is_bounded_and_keeps_both_ends(words: list[str], times: int, limit: int, place: str) -> None:
    text = "\n".join(word * times for word in words)
    short = truncate(text, limit, place)
    assert len(short.encode()) <= limit
    assert max(map(len, short.split("\n"))) <= MAX_LINE + 1200
    if len(text.encode()) <= limit and all(len(line) <= MAX_LINE for line in text.split("\n")):
        assert short == text


def test_a_long_line_keeps_both_ends_and_names_its_source() -> None:
    text = "Traceback:\nValueError: " + "x" * 300_000 + "end"
    heading, word, line = truncate(text, LIMIT, "/logs/stderr.log on n3").split("\n")
    assert heading == "Traceback:"
    assert word == "[the next line is cut; all of it is in /logs/stderr.log on n3]"
    assert line == truncate_line(text.split("\n")[1])
    assert line.startswith("ValueError: xxx")
    assert line.endswith(f"{'x' * 97}end")
    assert len(line) == MAX_LINE


def test_a_text_of_many_lines_loses_its_middle() -> None:
    text = "\n".join(f"line {number}" for number in range(30_000))
    lines = truncate(text, LIMIT, "/logs/error.json on n3").split("\n")
    assert (lines[0], lines[-1]) == ("line 0", "line 29999")
    (word,) = [line for line in lines if line.startswith(TRUNCATION_MARK)]
    assert word == f"{TRUNCATION_MARK} at least 295 kB are cut here; all of it is in /logs/error.json on n3"
    before, after = lines.index(word), len(lines) - lines.index(word)
    assert 1.5 < after / before < 2.5
    assert len("\n".join(lines)) > LIMIT - 20


def test_the_last_line_is_the_same_wherever_all_of_it_is() -> None:
    """Failures that come back are known by it."""
    for text in ("x" * 5000, "a\n" + "x" * 5000, "a\n" * 20_000 + "end"):
        first, second = (truncate(text, LIMIT, f"/logs/attempt_{number}") for number in (1, 2))
        assert first != second
        assert first.split("\n")[-1] == second.split("\n")[-1]


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert truncate("\ud800a", LIMIT) == "?a"


def test_a_headline_is_the_first_line_that_is_not_blank() -> None:
    assert first_line("\n  ValueError: a\nb\n") == "ValueError: a"
    assert first_line("") == ""
    assert len(first_line("x" * 5000)) == MAX_LINE


ENDED = ["noise", "Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: boom"]


@pytest.mark.parametrize(
    ("lines", "is_last"),
    [
        (ENDED, True),
        ([f"[rank1]: {line}" for line in ENDED[1:]], True),
        (ENDED[:-1], False),
        ([*ENDED, "step 7"], False),
        (["step 7"], False),
        ([], False),
    ],
)
def test_a_traceback_that_nothing_follows_was_not_caught(lines: list[str], is_last: bool) -> None:
    assert is_last_traceback(lines) is is_last
