"""Named tuples made without `typing` behave like those of `typing`."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from rallypoint.base import light_typing


class Other(light_typing.NamedTuple):
    name: str
    port: int = 80
    tags: tuple[str, ...] = ()


class Ours(light_typing.NamedTuple):
    """A place."""

    name: str
    port: int = 80
    tags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"{self.name}:{self.port}"

    @classmethod
    def local(cls) -> Ours:
        return cls("localhost")

    def __str__(self) -> str:
        return self.url


class Theirs(typing.NamedTuple):
    """A place."""

    name: str
    port: int = 80
    tags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"{self.name}:{self.port}"

    @classmethod
    def local(cls) -> Theirs:
        return cls("localhost")

    def __str__(self) -> str:
        return self.url


class Nothing(light_typing.NamedTuple):
    pass


CALLS: dict[str, typing.Callable[[Any], object]] = {
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
    "pickled": lambda kind: (tuple(again := pickle.loads(pickle.dumps(kind("a")))), type(again) is kind),
}


def matched(kind: Any) -> object:
    match kind("a", 7):
        case kind(_, port):
            return port
    return "no match"


CALLS["matched"] = matched


def outcome(call: typing.Callable[[Any], object], kind: Any) -> object:
    """What a call returns, or how it fails."""
    try:
        return call(kind)
    except (TypeError, ValueError, AttributeError) as error:
        text = str(error).replace(kind.__name__, "Kind").replace("Kind.__new__", "<lambda>")
        return type(error), text.replace("<lambda>", "Kind.__new__")


@pytest.mark.parametrize("name", CALLS)
def test_a_named_tuple_is_that_of_typing(name: str) -> None:
    assert outcome(CALLS[name], Ours) == outcome(CALLS[name], Theirs)


def test_records_of_two_classes_are_never_equal() -> None:
    one: object = Ours("a")
    other: object = Other("a")
    assert (one == other, one != other, len({one, other})) == (False, True, 2)
    assert (one == Ours("a"), one == ("a", 80, ())) == (True, True)


def test_one_without_fields() -> None:
    assert (Nothing(), Nothing._fields, repr(Nothing())) == ((), (), "Nothing()")


def test_a_default_stands_behind_all_others() -> None:
    with pytest.raises(TypeError, match="without a default that follows one with a default"):

        class _Bad(light_typing.NamedTuple):
            port: int = 80
            name: str  # type: ignore[misc]


def test_what_takes_types_is_itself() -> None:
    T = light_typing.TypeVar("T")

    class Box(light_typing.Generic[T]):
        def __init__(self, inside: T) -> None:
            self.inside = inside

    assert Box[int](3).inside == 3
    assert light_typing.get_args(int | str) == (int, str)
