"""Compares torch with Rallypoint, and finds the place of each difference in the contract."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from rallypoint.agent.workers import constant_environment, worker_environment
from rallypoint.base.flags import number, restarts, split_filters, whole_number
from rallypoint.cli.flags import BEYOND_TORCHRUN, FLAGS
from rallypoint.compat.names import MODULES, _home
from rallypoint.compat.run import get_args_parser
from rallypoint.failures.record import VARIABLE as ERROR_FILE_VARIABLE
from rallypoint.rendezvous.backends.option_table import OPTIONS
from tests.drift.explained import EXPLAINED, SINCE
from tests.drift.theirs import FILE_NAME, SAME, UNKNOWN, Call, Module, TheirFlag, Torch, facts
from tests.unit.agent.test_environment import WORKER, group

_REPOSITORY = Path(__file__).parents[2]
_CONTRACT = _REPOSITORY / "docs/contract"
ANSWERED = Path(__file__).with_name("answered.json")
"""The version that the contract answers, with all its facts."""

_VARIADIC = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
_SIMPLE = (bool, int, float, str, type(None), Enum)
_READERS = {
    str: "str",
    whole_number: "int",
    restarts: "int",  # or a budget in a window, which torchrun does not have
    number: "float",
    split_filters: "comma_separated_list",
}


class Line(NamedTuple):
    """One difference. `change` is that from ours to torch: new, gone or changed. No `place`: nothing says so."""

    change: str
    fact: str
    about: str = ""
    place: str = ""

    def __str__(self) -> str:
        about = f": {self.about}" if self.about else ""
        return (
            f"{self.change:<8}{self.fact}{about}\n        {self.place or 'NOWHERE in the contract or its differences'}"
        )


def compare(torch: Torch) -> list[Line]:
    """All differences between this torch and Rallypoint, each with its place."""
    return [
        line._replace(place=_place(line, torch.version)) for line in (*_since_answered(torch), *_beside_ours(torch))
    ]


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Line]:
    """What is new, gone or changed between two versions. Of a name that is new or gone, its parts are not told too."""
    for change, had, has in (("gone", old, new), ("new", new, old)):
        lost = [fact for fact in had if fact not in has]
        yield from (Line(change, fact) for fact in lost if not any(fact.startswith(_parts_of(each)) for each in lost))
    for fact in old.keys() & new.keys():
        if old[fact] != new[fact]:
            about = "another text" if fact.startswith("help of ") else f"{old[fact]} -> {new[fact]}"
            yield Line("changed", fact, about)


def _parts_of(fact: str) -> tuple[str, ...]:
    """The beginnings of the facts that are about a part of this one."""
    if fact.startswith("flag "):
        return (fact.replace("flag ", "help of "),)
    return (f"{fact}.", f"{fact}(") if fact.startswith("name ") else ("\0",)


def _since_answered(torch: Torch) -> Iterator[Line]:
    """What differs from the version that the contract answers, where there is nothing of ours to compare with."""
    known: dict[str, str] = json.loads(ANSWERED.read_text())["facts"]
    told = ("help of ", "name ", "variable ")
    old, new = ({fact: text for fact, text in each.items() if fact.startswith(told)} for each in (known, facts(torch)))
    yield from sorted(changes(old, new), key=lambda line: line.fact)


def _beside_ours(torch: Torch) -> Iterator[Line]:
    yield from _flag_lines(torch.flags)
    for (module, name), their in sorted(torch.calls.items(), key=lambda item: item[0]):
        if (found := _ours(module, name)) is not None:
            yield from (Line("changed", f"name {module}.{name}", text) for text in call_differences(found[0], their))
    for kind, theirs, ours in (
        ("worker variable", torch.worker_variables, _worker_variables()),
        ("option", torch.options, {each.name for each in OPTIONS if not each.beyond_torchrun}),
        ("file", torch.file_names, _texts("workers/logs/specs.py")),
        ("member of the error file", torch.error_members, _error_members()),
        ("entry point", torch.entry_points, _ENTRY_POINTS),
    ):
        yield from (Line("new", f"{kind} {each}") for each in sorted(theirs - ours))
        yield from (Line("gone", f"{kind} {each}") for each in sorted(ours - theirs))
    unread = torch.read_variables - _variables()
    yield from (Line("changed", f"variable {each}", "is not read here") for each in sorted(unread))


_ENTRY_POINTS = {
    "console_scripts: torchrun = torch.distributed.run:main",
    "torchrun.logs_specs: default = torch.distributed.elastic.multiprocessing:DefaultLogsSpecs",
}
"""Those that Rallypoint stands for: the command `rallyrun`, and the name `default`."""


# Flags


def _flag_lines(theirs: Mapping[str, TheirFlag]) -> Iterator[Line]:
    ours = _our_flags()
    yield from (Line("gone", f"flag {name}") for name in ours.keys() - theirs.keys())
    for name, their in theirs.items():
        if name not in ours:
            yield Line("new", f"flag {name}")
            continue
        our = ours[name]
        for part in ("spellings", "reads", "default", "choices", "variable"):
            had, has = getattr(their, part), getattr(our, part)
            if had not in (UNKNOWN, has) and not (part == "choices" and not had):
                yield Line("changed", f"flag {name}", f"{part}: torch {had!r}, ours {has!r}")


def _our_flags() -> dict[str, TheirFlag]:
    """Our flags as torch's are read; those that torch does not have are left out."""
    rows = {flag.dest: flag for flag in FLAGS}
    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true", default=False)  # as `launch` does
    found = {}
    for action in parser._actions:
        if action.dest in BEYOND_TORCHRUN or "--help" in action.option_strings:
            continue
        row = rows.get(action.dest)
        has_default = action.dest == "use_env" or (row is not None and action.nargs != 0)
        made = TheirFlag(
            tuple(sorted(action.option_strings, key=lambda each: (each.startswith("--"), "_" in each)))
            or (action.dest,),
            "switch" if action.nargs == 0 else _READERS[action.type or str],
            action.default if has_default else Parameter.empty,
            tuple(action.choices or ()),
            row is not None and row.from_environment,
            "",
        )
        found[made.name] = made
    return found


# Names


def _ours(module: str, name: str) -> tuple[Any] | None:
    """What Rallypoint has for a name of torch; None if it is fetched from torch."""
    path = module.removeprefix("distributed.")
    if path not in ("run", "launch") and not (path in MODULES and _home(path, name)[0]):
        return None
    return (getattr(import_module(f"rallypoint.compat.{path}"), name),)


def call_differences(ours: Any, theirs: Call) -> list[str]:
    """In what a use of torch's name would not be answered the same way."""
    if theirs.kind == SAME:
        return []
    if theirs.kind != _kind(ours):
        return [f"is a {_kind(ours)}, not a {theirs.kind}"]
    told = parameter_differences(parameters(ours), theirs.parameters)
    if isinstance(theirs.value, (str, int)) and theirs.value != ours:
        told.append(f"is {ours!r}, not {theirs.value!r}")
    for name, member in theirs.members.items():
        if not _has_member(ours, name):
            told.append(f"has no {name}")
        elif member.kind == "function":
            found = parameters(inspect.getattr_static(ours, name))
            told += [f"{name}: {text}" for text in parameter_differences(found, member.parameters)]
    return told


def _kind(thing: object) -> str:
    if isinstance(thing, type):
        return "class"
    return "function" if inspect.isroutine(thing) else "constant"


def parameters(thing: Any) -> list[Parameter] | None:
    """Those of a call, without `self`; None where Python cannot say."""
    thing = getattr(thing, "__func__", thing)  # a class or static method
    if isinstance(thing, type):
        if issubclass(thing, Enum):
            return None
        # A class with a `__new__` that takes anything is called as its `__init__` says.
        made = "__new__" in vars(thing) and "__init__" in vars(thing)
        return _signature(vars(thing)["__init__"])[1:] if made else _signature(thing)
    if not callable(thing):
        return None
    found = _signature(thing)
    return found[1:] if found and found[0].name in ("self", "cls") else found


def _signature(thing: Any) -> list[Parameter]:
    try:
        return list(inspect.signature(thing).parameters.values())
    except ValueError:
        return []


def parameter_differences(found: Sequence[Parameter] | None, expected: Sequence[Parameter] | None) -> list[str]:
    """In what a call that torch takes would not be taken the same way."""
    if found is None or expected is None:
        return []
    told = []
    for place, parameter in enumerate(expected):
        if parameter.kind in _VARIADIC:
            if not any(each.kind is parameter.kind for each in found):
                told.append(f"takes no *{parameter.name}")
            continue
        if place >= len(found) or found[place].name != parameter.name:
            told.append(
                f"parameter {place} is {[each.name for each in found[place : place + 1]]}, not {parameter.name}"
            )
            continue
        had, has = parameter.default, found[place].default
        if had is not Parameter.empty and (
            has is Parameter.empty or (isinstance(had, _SIMPLE) and str(had) != str(getattr(has, "value", has)))
        ):
            told.append(f"{parameter.name}={has!r}, not {had!r}")
    return told + [
        f"{each.name} has no default"
        for each in found[len(expected) :]
        if each.default is each.empty and each.kind not in _VARIADIC
    ]


def _has_member(ours: Any, name: str) -> bool:
    """Whether a class has it, declares it, or gives it to each instance when that is made."""
    ways = [vars(each).get("__init__") for each in ours.__mro__]
    made = [way.__code__.co_names for way in ways if inspect.isfunction(way)]
    declared = [getattr(each, "__annotations__", {}) for each in ours.__mro__]
    return hasattr(ours, name) or any(name in names for names in [*made, *declared])


# Variables, options, files


def _worker_variables() -> set[str]:
    made = group()
    made.spec.virtual_local_rank = True
    environ = {"OMP_NUM_THREADS": "1", "HIP_VISIBLE_DEVICES": "0,1"}
    constant = constant_environment(made.spec, environ)
    return {ERROR_FILE_VARIABLE, *worker_environment(made, WORKER, constant, environ)} - {"PYTHONFAULTHANDLER"}


def _variables() -> set[str]:
    """All that we read or set."""
    tables = tomllib.loads((_REPOSITORY / "docs/generate/environment.toml").read_text())
    return {name for sections in tables.values() for section in sections.values() for name in section}


def _texts(source: str) -> set[str]:
    return set(_module(source).texts(FILE_NAME))


def _error_members() -> set[str]:
    found = {*_module("failures/failure.py").keys(), *_module("failures/record.py").keys()}
    return found & {"message", "extraInfo", "py_callstack", "timestamp", "errorCode"}


def _module(source: str) -> Module:
    return Module(source, ast.parse((_REPOSITORY / "src/rallypoint" / source).read_text()))


# Places


def _place(line: Line, version: str) -> str:
    """Where the contract has the difference; empty if nowhere."""
    for pattern, since in SINCE.items():
        if line.change != "new" and _older(version, since) and re.fullmatch(pattern, f"{line.fact}: {line.about}"):
            return f"docs/contract/README.md: since torch {since}{_section(line.fact)}"
    for pattern, where in EXPLAINED.items():
        if re.fullmatch(pattern, f"{line.fact}: {line.about}"):
            return f"in the differences: {where}{_section(line.fact)}"
    return ""


def _older(version: str, since: str) -> bool:
    one, other = ([int(part) for part in text.split(".")[:2]] for text in (version, since))
    return one < other


@cache
def _sections() -> list[tuple[str, str]]:
    """Each section's heading and text."""
    found = []
    for page in sorted(_CONTRACT.glob("0*.md")):
        for part in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)[1:]:
            heading, _, text = part.partition("\n")
            found.append((heading, text))
    return found


def _section(fact: str) -> str:
    """The contract's section that names what a fact is about."""
    token = fact.rsplit(maxsplit=1)[-1].rpartition(".")[2]
    for heading, text in _sections():
        if f"`{token}" in text:
            return f" (contract section {heading.split()[0].rstrip('.')})"
    return ""
