"""Tracebacks at the end of standard error."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.failures.texts import truncate
from rallypoint.failures.tracebacks import (
    clean_lines,
    exception_line,
    is_last_traceback,
    is_said_after,
    is_traceback,
    last_lines,
    last_traceback,
    last_words,
    tracebacks,
    unfold_json,
)

WORDS = st.text(alphabet="abc: é", min_size=1, max_size=10).filter(str.strip)


def _raised(depth: int, words: str, how: str) -> str:
    """Python's traceback of a chain of `depth` exceptions."""
    try:
        if depth:
            try:
                raise KeyError(words)
            except KeyError as first:
                if how == "cause":
                    raise ValueError(words) from first
                raise ValueError(words)  # noqa: B904 - a chain by context
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
def test_last_traceback(depth: int, words: str, how: str, before: list[str], after: list[str], mark: str) -> None:
    text = _raised(depth, words, how).rstrip("\n")
    shown = "\n".join(mark + line if line else line for line in text.split("\n"))
    stderr = "\n".join([*before, shown, "", "WARNING:root:late", *after, ""])
    expected = "\n".join(line.rstrip() for line in text.split("\n")).rstrip()
    found = last_traceback(clean_lines(stderr.encode()))
    assert found == expected
    assert is_traceback(found)
    assert exception_line(found) == f"ValueError: {words}".rstrip()


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
def test_the_relevant_exception(code: str, line: str, kept: str, left_out: str) -> None:
    found = last_traceback(clean_lines(_stderr_of(code)))
    assert exception_line(found) == line
    assert kept in found
    assert left_out not in found


def test_clean_lines() -> None:
    stderr = b"\n\x1b[1;31mred\x1b[0m\r\n 10%\r 20%\r\n\x1b]0;title\x07plain\n\n"
    assert clean_lines(stderr) == ["red", " 20%", "plain"]
    coloured = b"\x1b[35mTraceback (most recent call last):\x1b[0m\n  File\n\x1b[1mE\x1b[0m: x\n"
    assert last_traceback(clean_lines(coloured)) == "Traceback (most recent call last):\n  File\nE: x"
    assert last_lines([str(number) for number in range(100)]) == "\n".join(str(number) for number in range(70, 100))


def test_a_traceback_without_its_heading() -> None:
    frame = '  File "x.py", line 1, in f\n    f()\n    ^^^\n'
    kept = f"rror, in g\n    g()\n{frame}{frame}RecursionError: too deep\n"
    found = last_traceback(clean_lines(kept.encode()))
    assert found == f"Traceback (most recent call last):\n  [...]\n{frame}{frame}RecursionError: too deep"
    assert exception_line(found) == "RecursionError: too deep"
    assert last_traceback(clean_lines((frame + frame).encode())) == ""
    assert last_traceback(clean_lines(("word\n" * 9 + frame + "end").encode())) == ""


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
def test_is_last_traceback(lines: list[str], is_last: bool) -> None:
    assert is_last_traceback(lines) is is_last


HEAD = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'

BELONGS = [
    "ValueError: 2 validation errors\n\nprecision: bf16 and fp8 exclude each other",
    "RuntimeError: CUDA error: device-side assert triggered\nFor debugging, pass CUDA_LAUNCH_BLOCKING=1\n\nCompile it",
    "RuntimeError: the server has not started:\n2024-01-01 12:00:00 ERROR port in use\n2024-01-01 12:00:01 INFO bye",
    "ValueError",
    "ValueError: \nthe reason",
    "ValueError: text\na note of PEP 678\n\n  another",
]


@pytest.mark.parametrize("text", BELONGS)
@pytest.mark.parametrize(
    "other",
    [
        "",
        "[W socket.cpp:464] a connection is shut down\nmore of it\n",
        "[rank1]:[W1128 18:53:19.891 27491 ProcessGroupNCCL.cpp:1250] Warning: destroy it\n",
        "W1128 18:53:19.892014 27491 x.py:434] late\n",
        "2024-01-01 12:00:00,123 - INFO - late\n",
        "11/28/2024 12:00:00 - INFO - late\n",
        "WARNING:root:late\n",
        "sys:1: ResourceWarning: unclosed file <_io.TextIOWrapper name='x'>\n",
        "/usr/lib/resource_tracker.py:254: UserWarning: leaked objects\n  warnings.warn('leaked')\n",
        "n1:77:80 [0] NCCL INFO comm 0x7 - Destroy COMPLETE\n",
        '{"event": "late", "level": "info"}\n',
        "wandb: waiting\n",
        "Exception ignored in: <function A.__del__ at 0x7>\n" + HEAD + "KeyError: 'noise'\n",
        "Process ForkProcess-1:\n",
        "terminate called without an active exception\n",
        "[rank3]: words of another\n",
    ],
)
def test_the_end_of_an_exception_s_text(text: str, other: str) -> None:
    lines = clean_lines((HEAD + text + "\n\n" + other).encode())
    found = last_traceback(lines)
    assert found == "\n".join(line.rstrip() for line in (HEAD + text).split("\n"))
    assert exception_line(found) == text.split("\n", maxsplit=1)[0].rstrip()
    assert is_traceback(found)


QUOTED = f"{HEAD}RuntimeError: the loader has failed:\n{HEAD}KeyError: 'image'\nsee its log"
CAUGHT = f"{HEAD}KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal {HEAD}KeyError: 'label'"
REASON = f"{HEAD}ValueError: the reason"
NOISE = f"{HEAD}KeyError: 'noise'\n"
IGNORED = f"{NOISE}Exception ignored in: <A>\n{NOISE}"


@pytest.mark.parametrize(
    ("stderr", "found"),
    [
        ("just\nwords\n", ""),
        ("", ""),
        (QUOTED, QUOTED),
        (CAUGHT, CAUGHT),
        (f"{HEAD}RuntimeError: one\nERROR:root:again:\n{HEAD}KeyError: 'image'", f"{HEAD}KeyError: 'image'"),
        (f"{REASON}\nTask exception was never retrieved\nfuture: <Task finished>\n{NOISE}", REASON),
        (f"{REASON}\n[...]\n{IGNORED}", REASON),  # a cut heading counts less
        (f"{REASON}\n[...]\nored in: <function A.__del__ at 0x7>\n{IGNORED}", REASON),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: E: one\n\n[rank0]: two\nnoise\n",
            "Traceback (most recent call last):\n  File\nE: one\n\ntwo",
        ),
    ],
)
def test_last_traceback_in_special_output(stderr: str, found: str) -> None:
    assert last_traceback(clean_lines(stderr.encode())) == found


def test_long_texts_are_cut() -> None:
    found = last_traceback(clean_lines((HEAD + "ValueError: x\n\n" + "words\n" * 9000).encode()))
    assert found.count("words") < 300
    assert exception_line(QUOTED) == "KeyError: 'image'"
    cut = truncate(f"{HEAD}ValueError: {'x' * 1000}", 9999, "/logs/attempt_1")
    assert exception_line(cut).startswith("ValueError: xxx")


BOX = """\
╭─────────────── Traceback (most recent call last) ────────────────╮
│ /home/ann/train.py:12 in <module>                                │
│                                                                  │
│ ❱ 12 main()                                                      │
│                                                                  │
│ ╭─ locals ─╮                                                     │
│ ╰──────────╯                                                     │
╰──────────────────────────────────────────────────────────────────╯
ValueError: no labels"""
LOGURU = """\
Traceback (most recent call last):

> File "train.py", line 12, in <module>
    main()
    └ <function main at 0x7>

  File "train.py", line 8, in main
    raise ValueError("no labels")

ValueError: no labels"""


@pytest.mark.parametrize(
    ("drawn", "file"), [(BOX, "/home/ann/train.py"), (LOGURU, "train.py"), (f"{HEAD}ValueError: no labels", "x.py")]
)
def test_traceback_formats(drawn: str, file: str) -> None:
    found = next(tracebacks(clean_lines(f"words\n{drawn}\nWARNING:root:late\n".encode())))
    assert found.text == drawn
    assert exception_line(found.text) == "ValueError: no labels"
    assert (found.file, found.is_of_program) == (file, True)


def test_unfold_json() -> None:
    entry = json.dumps({"level": "error", "exception": f"{HEAD}ValueError: x", "message": "failed"})
    assert last_traceback(unfold_json(["before", entry, "after"])) == f"{HEAD}ValueError: x\nafter"
    for other in ("{" + entry, "[1]", 'Traceback (most recent call last):\\n"'):
        assert unfold_json([other]) == [other]


def test_last_words() -> None:
    words = "no checkpoint may be written:\n  the quota is used up"
    ignored = f"Exception ignored in: <A>\n{HEAD}KeyError: 'noise'"
    lines = clean_lines(f"{HEAD}ValueError: x\n{words}\n[W socket.cpp:464] late\n{ignored}\n".encode())
    found = [*tracebacks(lines)]
    assert last_words(lines, found, found[-1].behind) == words
    assert is_said_after(words, "\n".join(lines))
    assert not is_said_after("ValueError: x", f"{HEAD}ValueError: x\nsee")
    logged = ["2024-01-01 12:00:00 | ERROR    | the quota is used up", "2024-01-01 12:00:00 | INFO     | bye"]
    assert last_words(logged, [], 0) == logged[0]


def test_exception_groups() -> None:
    try:
        try:
            raise ValueError("one")
        except ValueError as one:
            raise ExceptionGroup("several", [one, ExceptionGroup("more", [one])]) from None
    except ExceptionGroup as error:
        group = "".join(traceback.format_exception(error)).rstrip()
    lines = clean_lines(f"{group}\nthe quota is used up\n".encode())
    found = [*tracebacks(lines)]
    assert found[0].text == group
    assert last_traceback(clean_lines(f"[rank0]: {group}".replace("\n", "\n[rank0]: ").encode())) == group
    assert last_words(lines, found, found[0].behind) == "the quota is used up"


PLAIN = f"{HEAD}ValueError: x\n\ny"


@pytest.mark.parametrize(
    "before",
    ["\r 50%|### | 1/2 [00:01<00:01,  1.0s/it]", "loading model ", "2024-01-01 12:00:00 ERROR ", "a? [rank0]: "],
)
def test_a_traceback_after_an_unfinished_line(before: str) -> None:
    mark = "[rank0]: " if before.endswith("[rank0]: ") else ""
    text = f"{before}{PLAIN}\nWARNING:root:late\n"
    if mark:
        text = text.replace("\n", f"\n{mark}").removesuffix(mark).replace(f"{mark}WARNING", "WARNING")
    lines = clean_lines(text.encode())
    assert last_traceback(lines) == PLAIN
    assert lines[0] == before.lstrip("\r").removesuffix(mark).rstrip()


@pytest.mark.parametrize("before", ["(trainer pid=7) ", "2024-01-01 12:00:00,123 | ERROR | ", "n1: "])
def test_prefixes_of_lines_are_removed(before: str) -> None:
    text = "\n".join((before + line).rstrip() for line in ("failed", *PLAIN.split("\n")))
    lines = clean_lines(f"{text}\n2024-01-01 12:00:00,124 | INFO | late\n".encode())
    assert last_traceback(lines) == PLAIN
    assert (lines[0], lines[-1]) == (f"{before}failed", "2024-01-01 12:00:00,124 | INFO | late")
