"""The names of `typing` for modules that are imported before the first worker starts, without importing `typing`.

Type checkers see `typing` itself. At run time, the names are placeholders that do nothing, except `NamedTuple`. Its
classes behave like those of `typing`, but values of two classes are never equal. Creating them takes an eighth of the
time, and a start creates more than a hundred.

Law: do not import this module where a placeholder would be used as a type at run time (`typing.get_type_hints`).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import (
        Any,
        ClassVar,
        Generic,
        NamedTuple,
        NoReturn,
        ParamSpec,
        Protocol,
        Self,
        TypeAlias,
        TypeGuard,
        TypeVar,
        get_args,
        overload,
    )
else:
    import sys
    from _collections import _tuplegetter
    from types import FunctionType

    _UNKNOWN_FIELD = TypeError if sys.version_info >= (3, 13) else ValueError

    class Protocol:
        __slots__ = ()

    class Generic:
        __slots__ = ()

        def __class_getitem__(cls, parameters):
            return cls

    class TypeVar:
        def __init__(self, name, bound=None):
            self.name = name

    class ParamSpec(TypeVar):
        pass

    def overload(function):
        return function

    def get_args(union):
        return union.__args__

    Any = ClassVar = NoReturn = Self = TypeAlias = TypeGuard = object

    class _Record(tuple):
        __slots__ = ()
        _fields = ()

        @classmethod
        def _make(cls, values):
            record = tuple.__new__(cls, values)
            if len(record) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(record)}")
            return record

        def _replace(self, /, **changes):
            record = tuple.__new__(type(self), map(changes.pop, self._fields, self))
            if changes:
                raise _UNKNOWN_FIELD(f"Got unexpected field names: {list(changes)!r}")
            return record

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __getnewargs__(self):
            return tuple(self)

        def __eq__(self, other):
            # Equal to a plain tuple, as in `typing`, but not to another record: `Succeed(2)` does not equal
            # `ConfirmRequest(2)`.
            return (type(self) is type(other) or not isinstance(other, _Record)) and tuple.__eq__(self, other)

        def __ne__(self, other):
            return not self == other

        __hash__ = tuple.__hash__

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(map('%s=%r'.__mod__, zip(self._fields, self, strict=True)))})"

    _CODE = {}
    """Constructors of named tuples, by number of fields: they differ only in the names."""

    def _constructor(name, fields, defaults):
        if (code := _CODE.get(len(fields))) is None:
            parameters = "".join(f"{field}, " for field in fields)
            code = _CODE[len(fields)] = eval(f"lambda _cls, {parameters}: _new(_cls, ({parameters}))").__code__
        code = code.replace(co_varnames=("_cls", *fields), co_name="__new__", co_qualname=f"{name}.__new__")
        return FunctionType(code, {"_new": tuple.__new__}, "__new__", defaults)

    class _Declaration(type):
        """Turns `class Name(NamedTuple)` into a plain tuple class."""

        def __new__(cls, name, bases, namespace):
            types = namespace.get("__annotations__", {})
            fields = tuple(types)
            defaults = {field: namespace[field] for field in fields if field in namespace}
            if tuple(defaults) != fields[len(fields) - len(defaults) :]:
                raise TypeError(f"{name} has a field without a default that follows one with a default")
            own = {
                "__annotations__": types,
                "__doc__": f"{name}({', '.join(fields)})",
                **namespace,
                "__match_args__": fields,
                "__new__": _constructor(name, fields, tuple(defaults.values())),
                "__slots__": (),
                "_field_defaults": defaults,
                "_fields": fields,
            }
            own.update({field: _tuplegetter(place, f"Field {place}") for place, field in enumerate(fields)})
            return type(name, (_Record,), own)

    NamedTuple = type.__new__(_Declaration, "NamedTuple", (), {})

__all__ = [
    "TYPE_CHECKING",
    "Any",
    "ClassVar",
    "Generic",
    "NamedTuple",
    "NoReturn",
    "ParamSpec",
    "Protocol",
    "Self",
    "TypeAlias",
    "TypeGuard",
    "TypeVar",
    "get_args",
    "overload",
]
