"""Dataclasses made without `dataclasses` behave like those of `dataclasses`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.base import light_dataclasses
from tests.processes import completed


def family(module: Any) -> dict[str, Any]:
    """The same classes, made by one module or the other."""
    dataclass, field = module.dataclass, module.field

    @dataclass
    class Plain:
        """A place."""

        KIND = "a constant"

        name: str
        port: int = 80
        tags: list[str] = field(default_factory=list)
        last: bytes = field(default=b"", kw_only=True, repr=False)
        shown: bool = field(default=True, repr=False)
        given: bool = field(init=False, default=True)
        found: str = field(init=False)

        def __post_init__(self) -> None:
            self.given = self.port != 80
            if self.port != 81:
                self.found = self.name

    @dataclass(frozen=True)
    class Frozen:
        """It cannot change."""

        name: str
        paths: dict[int, str] = field(default_factory=dict)
        port: int = 80

    @dataclass(eq=False, repr=False)
    class Identity:
        """It is only itself."""

        name: str

    @dataclass(slots=True)
    class Slots:
        """It has no dictionary."""

        name: str
        port: int = 80

        @property
        def url(self) -> str:
            return f"{self.name}:{self.port}"

    return {each.__name__: each for each in (Plain, Frozen, Identity, Slots)}


OURS, THEIRS = family(light_dataclasses), family(dataclasses)


def _parameters(kind: Any) -> list[tuple[object, ...]]:
    shown = inspect.signature(kind).parameters.values()
    return [(each.name, repr(each.default), str(each.annotation), each.kind) for each in shown]


def _below(kind: Any) -> object:
    @dataclasses.dataclass
    class Below(kind):
        more: int = 1

    made = Below("a")
    return repr(made), dataclasses.asdict(made), [each.name for each in dataclasses.fields(Below)]


def _matched(kind: Any) -> object:
    match kind("a", 7):
        case kind(name, port):
            return name, port
    return "no match"


CALLS: dict[str, Callable[[Any], object]] = {
    "shown": lambda kind: repr(kind("a")).partition("<locals>.")[2].partition(" at 0x")[0],  # an address is chance
    "values": lambda kind: vars(kind("a")),
    "positions": lambda kind: vars(kind("a", 1)),
    "keywords": lambda kind: vars(kind(port=1, name="a")),
    "none given": lambda kind: kind(),
    "unknown": lambda kind: kind("a", color="red"),
    "not in the constructor": lambda kind: kind("a", given=True),
    "class attributes": lambda kind: [
        repr(getattr(kind, name, None)) for name in ("KIND", "port", "shown", "given", "tags")
    ],
    "no default": lambda kind: repr(kind.name),
    "equal": lambda kind: (kind("a") == kind("a"), kind("a") == kind("b"), kind("a") == ("a",), kind("a") != kind("a")),
    "hash": lambda kind: len({hash(each) for each in [kind("a"), kind("a")]}),  # both at once
    "one value not set": lambda kind: kind("a", 81).found,
    "one list each": lambda kind: kind("a").tags is kind("a").tags,
    "set": lambda kind: setattr(kind("a"), "port", 1),
    "set another": lambda kind: setattr(kind("a"), "other", 1),
    "delete": lambda kind: delattr(kind("a"), "port"),
    "signature": _parameters,
    "positional": lambda kind: kind.__match_args__,
    "matched": _matched,
    "fields": lambda kind: [
        (each.name, each.type, each.init, each.repr, each.compare, each.kw_only) for each in dataclasses.fields(kind)
    ],
    "of an instance": lambda kind: (len(dataclasses.fields(kind("a"))), dataclasses.is_dataclass(kind("a"))),
    "is one": dataclasses.is_dataclass,
    "as dict": lambda kind: dataclasses.asdict(kind("a")),
    "as tuple": lambda kind: dataclasses.astuple(kind("a")),
    "replaced": lambda kind: dataclasses.asdict(dataclasses.replace(kind("a"), port=1)),
    "replaced what is not in the constructor": lambda kind: dataclasses.replace(kind("a"), given=True),
    "copied": lambda kind: dataclasses.asdict(copy.deepcopy(kind("a", 7))),
    "parameters": lambda kind: (kind.__dataclass_params__.frozen, kind.__dataclass_params__.eq),
    "a class below": _below,
    "text": lambda kind: kind.__doc__,
    "slots": lambda kind: (getattr(kind, "__slots__", None), hasattr(kind("a"), "__dict__")),
    "property": lambda kind: kind("a").url,
}


def outcome(call: Callable[[Any], object], kind: Any) -> object:
    """What a call returns, or how it fails."""
    try:
        return call(kind)
    except (TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("name", CALLS)
def test_a_dataclass_is_that_of_dataclasses(name: str, kind: str) -> None:
    assert outcome(CALLS[name], OURS[kind]) == outcome(CALLS[name], THEIRS[kind])


def test_our_own_travel() -> None:
    from rallypoint.agent.launch import LaunchConfig

    config = LaunchConfig(1, 2, 3, rdzv_configs={"a": 1})
    again = pickle.loads(pickle.dumps(config))
    assert again.rdzv_configs == config.rdzv_configs
    assert light_dataclasses.replace(OURS["Frozen"]("a"), port=7) == OURS["Frozen"]("a", port=7)


@pytest.mark.process
def test_dataclasses_are_imported_when_somebody_asks() -> None:
    program = """if True:
        import logging, sys
        before = "dataclasses" in sys.modules  # by logging, from Python 3.14 on
        from rallypoint.agent.launch import LaunchConfig
        before = not before and "dataclasses" in sys.modules
        import dataclasses
        print(before, [each.name for each in dataclasses.fields(LaunchConfig)][:2])"""
    ran = completed([sys.executable, "-c", program], check=True)
    assert ran.stdout == "False ['min_nodes', 'max_nodes']\n"
