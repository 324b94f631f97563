"""`dataclass` and `field` for modules that are imported before the first worker starts, without importing
`dataclasses`.

Type checkers see `dataclasses`. Code that asks a class for its fields (`dataclasses.fields`, `replace`, `asdict`, a
derived dataclass) gets them, and causes the import only then. The import takes longer than all our classes, since it
pulls in modules that inspect source code.

Law: for the arguments supported here, a class behaves as if `dataclasses` had created it.
"""

from __future__ import annotations

from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:

    class _Missing:
        def __repr__(self):
            return "<factory>"

    _FACTORY = _Missing()
    """The default of a parameter whose value comes from a factory."""
    _NONE = _Missing()

    class _Field:
        def __init__(self, default=_NONE, default_factory=_NONE, init=True, repr=True, kw_only=False):
            self.default, self.default_factory = default, default_factory
            self.init, self.repr, self.kw_only = init, repr, kw_only

    def field(**arguments):
        """One field; see `dataclasses.field` for the arguments."""
        return _Field(**arguments)

    def dataclass(cls=None, /, *, eq=True, repr=True, frozen=False, slots=False):
        """Turn a class into a dataclass; see `dataclasses.dataclass` for the arguments."""
        if cls is None:
            return lambda cls: _build_class(cls, eq, repr, frozen, slots)
        return _build_class(cls, eq, repr, frozen, slots)

    def replace(instance, /, **changes):
        """Copy with other values; see `dataclasses.replace`."""
        values = {name: getattr(instance, name) for name in instance.__init__.__annotations__ if name != "return"}
        return type(instance)(**values | changes)

    class _Fields:
        """`__dataclass_fields__` and `__dataclass_params__`, created by `dataclasses` on first use."""

        def __init__(self, name, fields, options):
            self._name, self._fields, self._options = name, fields, options

        def __get__(self, instance, owner=None):
            import dataclasses

            own = {"__annotations__": {name: kind for name, (kind, _) in self._fields.items()}}
            for name, (_, field) in self._fields.items():
                defaults = {"default": field.default, "default_factory": field.default_factory}
                defaults = {key: value for key, value in defaults.items() if value is not _NONE}
                own[name] = dataclasses.field(**defaults, init=field.init, repr=field.repr, kw_only=field.kw_only)
            shadow = dataclasses.dataclass(**self._options)(type("Shadow", (), own))
            return getattr(shadow, self._name)

    def _build_class(cls, eq, repr, frozen, slots):
        fields = {}
        own = vars(cls)
        for name, kind in own.get("__annotations__", {}).items():
            default = own.get(name, _NONE)
            fields[name] = kind, default if isinstance(default, _Field) else _Field(default)
        options = {"eq": eq, "repr": repr, "frozen": frozen}
        own = {name: _Fields(name, fields, options) for name in ("__dataclass_fields__", "__dataclass_params__")}
        own["__init__"] = _init(cls, fields, frozen)
        own["__match_args__"] = tuple([name for name, (_, field) in fields.items() if field.init and not field.kw_only])
        own["__replace__"] = _replace
        shown = [name for name, (_, field) in fields.items() if field.repr]
        if repr:
            own["__repr__"] = lambda self: (
                f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in shown])})"
            )
        if eq:
            own.update(_comparing(tuple(fields)))
            own["__hash__"] = own["__hash__"] if frozen else None
        if frozen:
            own["__setattr__"] = lambda self, name, value: _refuse(f"cannot assign to field {name!r}")
            own["__delattr__"] = lambda self, name: _refuse(f"cannot delete field {name!r}")
        for name, (_, field) in fields.items():
            if field.default is not _NONE:
                setattr(cls, name, field.default)
            elif name in vars(cls):
                delattr(cls, name)
        if slots:
            members = {
                name: value for name, value in cls.__dict__.items() if name not in (*fields, "__dict__", "__weakref__")
            }
            members |= {"__qualname__": cls.__qualname__, "__slots__": tuple(fields)}
            return type(cls)(cls.__name__, cls.__bases__, members | own)
        for name, value in own.items():
            setattr(cls, name, value)
        return cls

    def _init(cls, fields, frozen):
        """Create the constructor: one function for all fields, as in `dataclasses`."""
        scope, body = {"_FACTORY": _FACTORY, "_set": object.__setattr__}, []
        parameters, named = ["self"], []
        for name, (_, field) in fields.items():
            parameter, value = name, name
            if field.default_factory is not _NONE:
                scope[f"_make_{name}"] = field.default_factory
                parameter = f"{name}=_FACTORY"
                value = f"_make_{name}() if {name} is _FACTORY else {name}" if field.init else f"_make_{name}()"
            elif field.default is not _NONE:
                scope[f"_default_{name}"] = field.default
                parameter, value = f"{name}=_default_{name}", name if field.init else f"_default_{name}"
            elif not field.init:
                continue  # the class sets the default itself
            if field.init:
                (named if field.kw_only else parameters).append(parameter)
            body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        parameters += ["*", *named] if named else []
        body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
        exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(body or ["pass"]), scope)
        init = scope["__init__"]
        init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
        init.__annotations__ = {name: kind for name, (kind, field) in fields.items() if field.init} | {"return": None}
        return init

    def _comparing(names):
        def values(self):
            return tuple([getattr(self, name) for name in names])

        def __eq__(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        return {"__eq__": __eq__, "__hash__": lambda self: hash(values(self))}

    def _replace(self, /, **changes):
        import dataclasses

        return dataclasses.replace(self, **changes)

    def _refuse(sentence):
        import dataclasses

        raise dataclasses.FrozenInstanceError(sentence)


__all__ = ["dataclass", "field", "replace"]
