from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.options import Features
from rallypoint.base.errors import UserError
from rallypoint.base.flags import Flag, split_filters
from rallypoint.cli import rallyctl
from rallypoint.cli.convert import STATIC_PORT
from rallypoint.cli.flags import BEYOND_TORCHRUN, FLAGS, GROUPS, FlagGroup
from rallypoint.cli.parse import Options, build_parser, parse
from rallypoint.cli.rallyrun import read_deprecated
from rallypoint.rendezvous.backends.option_table import KNOWN
from rallypoint.rendezvous.params import C10D_PORT, ETCD_PORT

_VALUED = [flag for flag in FLAGS if flag.read is not None]
_SWITCHES = [flag for flag in FLAGS if flag.read is None]


def _samples(flag: Flag[Any]) -> tuple[str, str]:
    """Two texts that the flag takes, the first of which is not its default."""
    first, second, *_ = sorted(flag.words, key=lambda word: word == flag.default) or flag.samples
    return first, second


def _sample(flag: Flag[Any]) -> str:
    return _samples(flag)[0]


def _value(flag: Flag[Any]) -> object:
    assert flag.read is not None
    return flag.read(_sample(flag))


def test_the_table_and_the_options_agree() -> None:
    names = [flag.dest for flag in (*Options.flags, *(flag for record in Features() for flag in record.flags))]
    assert sorted(names) == sorted(flag.dest for flag in FLAGS)
    assert len(names) == len(set(names))
    with pytest.raises(TypeError, match="'preloads'"):
        Features.of(preloads=())


def test_defaults_come_from_the_table() -> None:
    options = parse(["s.py"], {})
    given = {"training_script": "s.py", "training_script_args": ()}
    assert options.flat() == {flag.dest: flag.default for flag in FLAGS} | given
    assert options.features == Features()
    assert not options.sources
    assert options.source("nproc_per_node") == "--nproc-per-node"


@pytest.mark.parametrize("flag", _VALUED, ids=lambda flag: flag.name)
def test_every_spelling_of_every_flag(flag: Flag[Any]) -> None:
    for spelling in flag.spellings:
        for written in ([spelling, _sample(flag)], [f"{spelling}={_sample(flag)}"]):
            if spelling == flag.short and len(written) == 1:
                continue
            options = parse([*written, "s.py"], {})
            assert options.flat()[flag.dest] == _value(flag)
            assert options.source(flag.dest) == flag.name


@pytest.mark.parametrize("flag", _SWITCHES, ids=lambda flag: flag.name)
def test_every_switch(flag: Flag[Any]) -> None:
    for spelling in flag.spellings:
        assert parse([spelling, "s.py"], {}).flat()[flag.dest] is True
        assert parse([spelling, "s.py"], {flag.variable: "0"}).flat()[flag.dest] is True


@pytest.mark.parametrize("flag", [flag for flag in _VALUED if flag.from_environment], ids=lambda flag: flag.name)
def test_the_command_line_takes_precedence(flag: Flag[Any]) -> None:
    from_environment = parse(["s.py"], {flag.variable: _sample(flag)})
    assert from_environment.flat()[flag.dest] == _value(flag)
    assert from_environment.source(flag.dest) == flag.variable
    other = _samples(flag)[1]
    both = parse([flag.name, other, "s.py"], {flag.variable: _sample(flag)})
    assert flag.read is not None
    assert both.flat()[flag.dest] == flag.read(other)
    assert both.source(flag.dest) == flag.name


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.from_environment], ids=lambda flag: flag.name)
def test_flags_without_a_variable(flag: Flag[Any]) -> None:
    assert parse(["s.py"], {flag.variable: _sample(flag)}).flat()[flag.dest] == flag.default


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], {})
    shown = capsys.readouterr()
    assert caught.value.code == 0
    assert shown.err == ""
    for group in GROUPS:
        example, _, rows = shown.out.partition(f"\n{group.title}:\n  example: ")[2].partition("\n\n")
        assert example.endswith(f" {group.example}")
        rows = rows.partition("\n\n")[0]
        for flag in group.flags:
            value = f" {re.escape(flag.metavar)}" if flag.read else ""
            assert re.search(rf"^  (-., )?{flag.name}{value}(  |$)", rows, re.MULTILINE), flag.name


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_examples_of_groups(group: FlagGroup) -> None:
    options = parse(group.example.split(), {})
    own = {flag.dest for flag in group.flags}
    assert own & options.sources.keys()
    assert options.training_script in ("train.py", "package.train")


@pytest.mark.parametrize("flag", _VALUED, ids=lambda flag: flag.name)
def test_help_names_defaults_and_choices(flag: Flag[Any]) -> None:
    shown = " ".join(build_parser().format_help().split())
    about = shown.partition(f"{flag.name} {flag.metavar} {flag.help} ")[2]
    if flag.default not in (None, "", ()):
        shown_default = f"{flag.default:g}" if isinstance(flag.default, float) else flag.default
        assert about.startswith(f"(default: {shown_default})")
    assert [choice for choice in flag.words if choice not in flag.help] == []


def test_help_of_rallyctl(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, sections in {
        "serve": ["listening", "TLS"],
        "token": ["job"],
        "etcd": ["listening and data", "start"],
    }.items():
        with pytest.raises(SystemExit):
            rallyctl.main([verb, "--help"])
        shown = capsys.readouterr().out
        assert [title for title in sections if f"\n{title}:\n" not in shown] == []
        assert f"\n  rallyctl {verb} --" in shown.partition("\nexamples:\n")[2]


@pytest.mark.parametrize("read", [partial(parse, environ={}), rallyctl.main], ids=["rallyrun", "rallyctl"])
def test_version(read: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(["--version"])
    shown = capsys.readouterr()
    command = "rallyctl" if read is rallyctl.main else "rallyrun"
    assert (caught.value.code, shown.out, shown.err) == (0, f"{command} {version('rallypoint')}\n", "")


def test_prefixes_mean_torchrun_s_flags(capsys: pytest.CaptureFixture[str]) -> None:
    plain = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    plain.add_argument("training_script")
    plain.add_argument("training_script_args", nargs=argparse.REMAINDER)
    of_torchrun = [flag for flag in FLAGS if flag.dest not in BEYOND_TORCHRUN]
    for flag in of_torchrun:
        if flag.read is None:
            plain.add_argument(*flag.spellings, dest=flag.dest, action="store_true")
        else:
            plain.add_argument(*flag.spellings, dest=flag.dest, type=flag.read, choices=flag.choices)
    prefixes = {flag.name[:end] for flag in of_torchrun for end in range(3, len(flag.name))} - {"--h", "--ve"}
    for prefix in sorted(prefixes):
        ends = []
        for read in (plain.parse_args, build_parser().parse_args):
            try:
                ends.append(vars(read([prefix, "1", "s.py"])))
            except SystemExit:
                ends.append({"error": capsys.readouterr().err.rpartition(": error: ")[2]})
        assert ends[0] == ends[1], prefix


@given(st.lists(st.text(alphabet="-=ab x1")))
def test_arguments_of_the_script(rest: list[str]) -> None:
    options = parse(["--nnodes=2", "s.py", "--nproc-per-node", "3", *rest], {})
    assert (options.nnodes, options.nproc_per_node, options.training_script) == ("2", "1", "s.py")
    assert options.training_script_args == ("--nproc-per-node", "3", *rest)


@pytest.mark.parametrize(
    ("arguments", "script", "rest"),
    [
        (["s.py", "--", "a", "--", "b"], "s.py", ("a", "--", "b")),
        (["s.py", "a", "--", "b"], "s.py", ("a", "--", "b")),
        (["--", "s.py", "--", "b"], "s.py", ("--", "b")),
        (["--standalone", "--", "-m", "--x"], "-m", ("--x",)),
        (["s.py", "--log", "x"], "s.py", ("--log", "x")),
        (["s.py", "--help"], "s.py", ("--help",)),
        (["--nnodes", "2", "-mr", "3", "mod", "-m"], "mod", ("-m",)),
        (["--role", "-1", "s.py", "2"], "s.py", ("2",)),
        (["-", "a"], "-", ("a",)),
        (["-x y", "a"], "-x y", ("a",)),
    ],
)
def test_the_script(arguments: list[str], script: str, rest: tuple[str, ...]) -> None:
    options = parse(arguments, {})
    assert (options.training_script, options.training_script_args) == (script, rest)


def test_errors_before_many_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--r", "1", "s.py", *["file"] * 100_000], {})
    assert "ambiguous option: --r " in capsys.readouterr().err


@given(st.lists(st.text(alphabet="ab ,", min_size=1).filter(lambda part: not part.startswith(",")), min_size=1))
def test_filters_with_commas(parts: list[str]) -> None:
    assert split_filters(",".join(part.replace(",", ",,") for part in parts)) == tuple(parts)


def test_help_names_backends_and_default_ports() -> None:
    shown = " ".join(build_parser().format_help().split())
    about = shown[shown.index("--rdzv-backend NAME") : shown.index("--rdzv-endpoint HOST:PORT")]
    assert [name for name in (*KNOWN, "store_type=file", "plug-in") if name not in about] == []
    about = shown[shown.index("--rdzv-endpoint HOST:PORT") : shown.index("--rdzv-id ID")]
    assert [port for port in (C10D_PORT, ETCD_PORT) if str(port) not in about] == []
    assert str(STATIC_PORT) in shown[shown.index("--master-port PORT") :]


@pytest.mark.parametrize(
    ("read", "arguments"),
    [
        (partial(parse, environ={}), ["-t=--", "s.py"]),
        (rallyctl.main, ["serve", "--endpoint=--"]),
        (rallyctl.main, ["token", "--job=--"]),
        (rallyctl.main, ["etcd", "--port=--"]),
    ],
)
def test_two_dashes(
    read: Callable[[list[str]], object], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun: argparse takes `--x=--` for the value `--` from Python 3.12.5 on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--x")
    if parser.parse_args(["--x=--"]).x:
        assert parse(["-t=--", "s.py"], {}).tee == "--"
        return
    with pytest.raises(SystemExit) as caught:
        read(arguments)
    assert caught.value.code == 2
    assert "'--' is not a value" in capsys.readouterr().err.splitlines()[-1]


# The deprecated command: `rallyrun` with `--use-env`

RANK = "--local-rank=${local_rank}"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["s.py", "a", "--use-env"], {}, (RANK, "a", "--use-env")),
        (["-m", "s", "--", "a"], {}, (RANK, "a")),
        (["--use-env", "s.py", "a"], {}, ("a",)),
        (["--use_env", "--no-python", "s", "--use-env"], {}, ("--use-env",)),
        (["s.py"], {"PET_USE_ENV": "1"}, (RANK,)),
    ],
)
def test_the_first_argument_is_the_local_rank(
    arguments: list[str], environ: dict[str, str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    options = read_deprecated(arguments, environ)
    assert options.training_script_args == words
    plain = [word for word in arguments if word not in ("--use-env", "--use_env")]
    assert options.replace(training_script_args=()) == parse(plain, environ).replace(training_script_args=())
    assert "FutureWarning: python -m rallypoint.launch is deprecated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environ", "source"), [(["--no-python"], {}, "--no-python"), ([], {"PET_NO_PYTHON": "1"}, "PET_NO_P")]
)
def test_programs_need_use_env(arguments: list[str], environ: dict[str, str], source: str) -> None:
    with pytest.raises(UserError, match=rf"{source}.* --use-env"):
        read_deprecated([*arguments, "true"], environ)
