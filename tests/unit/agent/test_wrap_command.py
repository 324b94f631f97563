"""The template of `--wrap`, and the ranks of `--wrap-ranks`."""

from __future__ import annotations

import pytest

from rallypoint.agent.options import Features
from rallypoint.base.errors import UsageError
from rallypoint.features import wrap
from rallypoint.features.wrap.command import Place, read_ranks, read_template

WORKER = ["/opt/bin/python3", "-u", "train.py", "--lr", "3 %r"]
MODULE = ["python", "-u", "-m", "package.train", "x"]
PLACE = Place(rank=5, local_rank=1, host="node7", round=2)


@pytest.mark.parametrize(
    ("command", "worker", "expected"),
    [
        ("nsys profile -o r%r", WORKER, ["nsys", "profile", "-o", "r5", *WORKER]),
        ("a %r-%l-%h-%n %%r 100%%", WORKER, ["a", "5-1-node7-2", "%r", "100%", *WORKER]),
        ("a 'b  c' \"d %l\"", WORKER, ["a", "b  c", "d 1", *WORKER]),
        ("a $((5678+%l)) :$((%r+%l+%n+1))", WORKER, ["a", "5679", ":9", *WORKER]),
        ("a $(( 5678 + %l ))", WORKER, ["a", "5679", *WORKER]),
        ("a -- %c --last", WORKER, ["a", "--", *WORKER, "--last"]),
        ("memray run -o %r.bin %s", WORKER, ["memray", "run", "-o", "5.bin", *WORKER[2:]]),
        ("memray run %s", MODULE, ["memray", "run", *MODULE[2:]]),
        ("python -m debugpy --listen $((1+%l))", WORKER, ["python", "-m", "debugpy", "--listen", "2", *WORKER[2:]]),
        ("python -X dev -Wx -m cProfile", MODULE, ["python", "-X", "dev", "-Wx", "-m", "cProfile", *MODULE[2:]]),
        ("python3.11 wrapper.py -m x", WORKER, ["python3.11", "wrapper.py", "-m", "x", *WORKER]),
        ("python -m wrapper %c", WORKER, ["python", "-m", "wrapper", *WORKER]),
        ("sh -c 'exec \"$@\"' sh", ["./train.sh"], ["sh", "-c", 'exec "$@"', "sh", "./train.sh"]),
        ("gdb -ex 'print $pc' --args", WORKER, ["gdb", "-ex", "print $pc", "--args", *WORKER]),
    ],
)
def test_command_lines(command: str, worker: list[str], expected: list[str]) -> None:
    assert read_template(command, {"HOME", "RANK"}).argv(worker, PLACE).argv == expected


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("py-spy record --", WORKER),
        ("python -m cProfile", ["python", "-m", "cProfile", *WORKER[2:]]),
        ("py-spy record -- python3 -m cProfile %s", ["python3", "-m", "cProfile", *WORKER[2:]]),
    ],
)
def test_programs_behind_a_wrapper(command: str, program: list[str]) -> None:
    assert read_template(command).argv(WORKER, PLACE).program == program


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("", "not a command"),
        ("''", "not a command"),
        ("a 'b", "closing quotation"),
        ("a %x", "%x is not one of"),
        ("a b%", "write %% for a percent"),
        ("a x%c", "a separate word"),
        ("a %c %s", "use one of them"),
        ("%c", "contains no program"),
        ("a $((2*%l))", "is not a valid sum"),
        ("a $((%h+1))", "is not a valid sum"),
        ("a $((", "without a sum"),
        ("a -o $HOME/r%r", "$HOME, which no shell expands"),
        ("a -o ${HOME}/r%r", "$HOME"),
        ("a -o $(date)", "$(date), which no shell expands"),
    ],
)
def test_invalid_commands(command: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_template(command, {"HOME"})
    assert why in str(raised.value)


@pytest.mark.parametrize("worker", [["./train.sh"], ["python", "-c", "pass"], ["python", "-X", "dev", "train.py"]])
def test_workers_that_are_no_scripts(worker: list[str]) -> None:
    with pytest.raises(UsageError, match="put %c"):
        read_template("python -m cProfile").argv(worker, PLACE)


@pytest.mark.parametrize(
    ("text", "ranks", "least"),
    [("", [0, 1, 2, 3, 4, 5], 0), ("0", [0], 1), ("0,3-5", [0, 3, 4, 5], 1), ("4, 2", [2, 4], 3), ("9", [], 10)],
)
def test_ranks(text: str, ranks: list[int], least: int) -> None:
    read = read_ranks(text)
    assert [rank for rank in range(6) if read.include(rank)] == ranks
    assert read.least == least


@pytest.mark.parametrize("text", ["a", "-1", "3-1", "0,,1", "0-", "1.5", ","])
def test_invalid_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="is neither a rank nor a range of ranks"):
        read_ranks(text)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"wrap": "/no/such --flag"}, "--wrap=/no/such --flag: /no/such was not found"),
        ({"wrap": "/etc/passwd"}, "is not executable"),
        ({"wrap_ranks": "0"}, "--wrap-ranks=0: it needs --wrap, which is not set"),
        ({"wrap": "env", "standby": 1}, "remove --standby"),
        ({"wrap": "env", "preload": ("json",)}, "choose the ranks to wrap with --wrap-ranks"),
    ],
)
def test_invalid_options(options: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError) as raised:
        wrap.check(Features.of(**options), {"PATH": "/usr/bin:/bin"})
    assert why in str(raised.value)


@pytest.mark.parametrize("options", [{"wrap": "env"}, {"wrap": "env", "wrap_ranks": "0", "preload": ("json",)}])
def test_valid_options(options: dict[str, object]) -> None:
    wrap.check(Features.of(**options), {"PATH": "/usr/bin:/bin"})
