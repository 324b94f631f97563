"""`light_dataclasses` behaves like `dataclasses`, and `light_typing` like `typing`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
import typing
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.base import light_dataclasses, light_typing
from tests.processes import completed


def family(module: Any) -> dict[str, Any]:
    """The same classes, made with either module."""
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
        """Compared by identity."""

        name: str

    @dataclass(slots=True)
    class Slots:
        """Without a dictionary."""

        name: str
        port: int = 80

        @property
        def url(self) -> str:
            return f"{self.name}:{self.port}"

    return {kind.__name__: kind for kind in (Plain, Frozen, Identity, Slots)}


OURS, THEIRS = family(light_dataclasses), family(dataclasses)


def _parameters(kind: Any) -> list[tuple[object, ...]]:
    parameters = inspect.signature(kind).parameters.values()
    return [(item.name, repr(item.default), str(item.annotation), item.kind) for item in parameters]


def _below(kind: Any) -> object:
    @dataclasses.dataclass
    class Below(kind):
        more: int = 1

    made = Below("a")
    return repr(made), dataclasses.asdict(made), [field.name for field in dataclasses.fields(Below)]


def _matched(kind: Any) -> object:
    match kind("a", 7):
        case kind(name, port):
            return name, port
    return "no match"


CALLS: dict[str, Callable[[Any], object]] = {
    "shown": lambda kind: repr(kind("a")).partition("<locals>.")[2].partition(" at 0x")[0],
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
    "hash": lambda kind: len({hash(made) for made in [kind("a"), kind("a")]}),
    "one value not set": lambda kind: kind("a", 81).found,
    "one list each": lambda kind: kind("a").tags is kind("a").tags,
    "set": lambda kind: setattr(kind("a"), "port", 1),
    "set another": lambda kind: setattr(kind("a"), "other", 1),
    "delete": lambda kind: delattr(kind("a"), "port"),
    "signature": _parameters,
    "positional": lambda kind: kind.__match_args__,
    "matched": _matched,
    "fields": lambda kind: [
        (field.name, field.type, field.init, field.repr, field.compare, field.kw_only)
        for field in dataclasses.fields(kind)
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
    """The result of a call, or its error."""
    try:
        return call(kind)
    except (TypeError, ValueError, AttributeError) as error:
        text = str(error).replace(kind.__name__, "Kind").replace("Kind.__new__", "<lambda>")
        return type(error), text.replace("<lambda>", "Kind.__new__")


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("name", CALLS)
def test_dataclasses_have_the_same_behavior(name: str, kind: str) -> None:
    assert outcome(CALLS[name], OURS[kind]) == outcome(CALLS[name], THEIRS[kind])


def test_pickle_and_replace() -> None:
    from rallypoint.agent.launch import LaunchConfig

    config = LaunchConfig(1, 2, 3, rdzv_configs={"a": 1})
    again = pickle.loads(pickle.dumps(config))
    assert again.rdzv_configs == config.rdzv_configs
    assert light_dataclasses.replace(OURS["Frozen"]("a"), port=7) == OURS["Frozen"]("a", port=7)


@pytest.mark.process
def test_dataclasses_is_imported_lazily() -> None:
    program = """if True:
        import logging, sys
        before = "dataclasses" in sys.modules  # by logging, from Python 3.14 on
        from rallypoint.agent.launch import LaunchConfig
        before = not before and "dataclasses" in sys.modules
        import dataclasses
        print(before, [field.name for field in dataclasses.fields(LaunchConfig)][:2])"""
    ran = completed([sys.executable, "-c", program], check=True)
    assert ran.stdout == "False ['min_nodes', 'max_nodes']\n"


# Named tuples


class Other(light_typing.NamedTuple):
    name: str
    port: int = 80
    tags: tuple[str, ...] = ()


def place(base: Any) -> Any:
    class Place(base):
        """A place."""

        name: str
        port: int = 80
        tags: tuple[str, ...] = ()

        @property
        def url(self) -> str:
            return f"{self.name}:{self.port}"

        @classmethod
        def local(cls) -> Place:
            return cls("localhost")

        def __str__(self) -> str:
            return self.url

    return Place


TUPLES = place(light_typing.NamedTuple), place(typing.NamedTuple)


class Nothing(light_typing.NamedTuple):
    pass


TUPLE_CALLS: dict[str, Callable[[Any], object]] = {
    "matched": _matched,
    "positions": lambda kind: tuple(kind("a", 1, ("x",))),
    "keywords": lambda kind: tuple(kind(tags=("x",), name="a")),
    "defaults": lambda kind: tuple(kind("a")),
    "none given": lambda kind: kind(),
    "one too many": lambda kind: kind("a", 1, (), 2),
    "unknown": lambda kind: kind("a", color="red"),
    "twice": lambda kind: kind("a", name="b"),
    "fields": lambda kind: (kind._fields, kind.__match_args__, kind._field_defaults, kind.__doc__, kind.__module__),
    "types": lambda kind: sorted(kind.__annotations__),
    "by name": lambda kind: (kind("a").name, kind("a").url, kind.local().port, str(kind("a"))),
    "as dict": lambda kind: kind("a")._asdict(),
    "replace": lambda kind: tuple(kind("a")._replace(port=1)),
    "replace unknown": lambda kind: kind("a")._replace(color="red"),
    "make": lambda kind: tuple(kind._make(iter(("a", 1, ())))),
    "make too few": lambda kind: kind._make(("a",)),
    "set": lambda kind: setattr(kind("a"), "port", 1),
    "set other": lambda kind: setattr(kind("a"), "other", 1),
    "shown": lambda kind: repr(kind("a")).replace(kind.__name__, "Kind"),
    "compared": lambda kind: (
        kind("a") == ("a", 80, ()),
        kind("a") < kind("b"),
        hash(kind("a")) == hash(("a", 80, ())),
    ),
    "kind": lambda kind: (isinstance(kind("a"), tuple), type(kind), type(copy.deepcopy(kind("a"))) is kind),
}


@pytest.mark.parametrize("name", TUPLE_CALLS)
def test_named_tuples_have_the_same_behavior(name: str) -> None:
    ours, theirs = (outcome(TUPLE_CALLS[name], kind) for kind in TUPLES)
    assert ours == theirs


def test_tuples_of_different_classes_are_not_equal() -> None:
    one: object = TUPLES[0]("a")
    other: object = Other("a")
    assert (one == other, one != other, len({one, other})) == (False, True, 2)
    assert (one == TUPLES[0]("a"), one == ("a", 80, ())) == (True, True)


def test_no_fields_and_pickling() -> None:
    assert (Nothing(), Nothing._fields, repr(Nothing())) == ((), (), "Nothing()")
    again = pickle.loads(pickle.dumps(Other("a")))
    assert (type(again), again) == (Other, Other("a"))


def test_fields_with_defaults_come_last() -> None:
    with pytest.raises(TypeError, match="without a default that follows one with a default"):

        class _Bad(light_typing.NamedTuple):
            port: int = 80
            name: str  # type: ignore[misc]


def test_generic() -> None:
    T = light_typing.TypeVar("T")

    class Box(light_typing.Generic[T]):
        def __init__(self, inside: T) -> None:
            self.inside = inside

    assert Box[int](3).inside == 3
    assert light_typing.get_args(int | str) == (int, str)
