"""What a torch offers, read from its files and never imported: it may be built for another system, or lie in a wheel.

1. Only facts are kept: names, parameters and defaults. Of help texts there is a digest, so that a change shows.
2. What cannot be read without running it (a default that is computed) is UNKNOWN, and equal to anything.
"""

from __future__ import annotations

import ast
import configparser
import hashlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

_PARTS = ("distributed/elastic/", "distributed/launcher/", "distributed/run.py", "distributed/launch.py", "numa/")
FILE_NAME = re.compile(r"[a-z_]+\.(log|json)|torchelastic_|attempt_")
_ASKS = frozenset({"get", "get_as_int", "get_as_bool"})
_PARAMETERS = frozenset({"params", "rdzv_params"})


class _Unknown:
    def __repr__(self) -> str:
        return "(computed)"


UNKNOWN: Any = _Unknown()


class TheirFlag(NamedTuple):
    """One `add_argument`. `reads` is the name of its type, `help` a digest."""

    spellings: tuple[str, ...]
    reads: str
    default: Any
    choices: tuple[str, ...]
    variable: bool
    help: str

    @property
    def name(self) -> str:
        """Its first long spelling, or the name of a positional argument."""
        return next((each for each in self.spellings if each.startswith("--")), self.spellings[0])


SAME = "same"
"""The kind of a name that a module has from another one, of which the facts are told."""


class Call(NamedTuple):
    """What a function or a class takes, and what a class has that users see."""

    kind: str
    parameters: tuple[Parameter, ...] | None
    members: dict[str, Call]
    value: Any = UNKNOWN
    """Of a constant, where it is a literal."""


class Torch(NamedTuple):
    """One version, by what users see. Calls are by module (below `torch`, dotted) and name."""

    version: str
    flags: dict[str, TheirFlag]
    calls: dict[tuple[str, str], Call]
    worker_variables: frozenset[str]
    read_variables: frozenset[str]
    options: frozenset[str]
    file_names: frozenset[str]
    error_members: frozenset[str]
    entry_points: frozenset[str]


def installed() -> Path:
    """The folder of the torch that is installed here."""
    return Path(str(distribution("torch").locate_file("")))


def read(where: Path) -> Torch:
    """Read the torch in a folder such as `site-packages`, or in a wheel. Raises FileNotFoundError if it has none."""
    sources = {name.removeprefix("torch/"): text for name, text in _files(where) if name.startswith("torch/")}
    trees = {name: ast.parse(text) for name, text in sources.items() if name.startswith(_PARTS)}
    if "distributed/run.py" not in trees:
        raise FileNotFoundError(f"{where} has no torch/distributed/run.py; give a wheel or the folder that has torch/")
    version = re.search(r"__version__ = '([^'+]+)", sources["version.py"])
    assert version is not None
    modules = {_module(name): Module(_module(name), tree, name.endswith("__init__.py")) for name, tree in trees.items()}
    reader = _Reader(modules)
    return Torch(
        version[1],
        {flag.name: flag for name in ("run", "launch") for flag in modules[f"distributed.{name}"].flags()},
        reader.calls(),
        frozenset(modules["distributed.elastic.agent.server.local_elastic_agent"].keys_of("worker_env"))
        | frozenset(modules["distributed.elastic.multiprocessing.api"].keys_of("envs")),
        frozenset(found for module in modules.values() for found in module.environment()),
        frozenset(found for name, module in modules.items() if ".rendezvous" in name for found in module.options()),
        frozenset(found for found in modules["distributed.elastic.multiprocessing.api"].texts(FILE_NAME)),
        frozenset(modules["distributed.elastic.multiprocessing.errors.error_handler"].keys()),
        frozenset(_entry_points(where)),
    )


def _files(where: Path) -> Iterator[tuple[str, str]]:
    wanted = (*(f"torch/{part}" for part in _PARTS), "torch/version.py")
    if where.is_dir():
        for top in ("torch/distributed", "torch/numa"):
            for path in sorted((where / top).rglob("*.py")):
                if (name := str(path.relative_to(where))).startswith(wanted):
                    yield name, path.read_text()
        yield "torch/version.py", (where / "torch/version.py").read_text()
        return
    with zipfile.ZipFile(where) as wheel:
        for name in wheel.namelist():
            if name.startswith(wanted) and name.endswith(".py"):
                yield name, wheel.read(name).decode()


def _entry_points(where: Path) -> Iterator[str]:
    """Programs and groups that concern launching, as `group: name = value`."""
    if where.is_dir():
        texts = [path.read_text() for path in where.glob("torch-*.dist-info/entry_points.txt")]
    else:
        with zipfile.ZipFile(where) as wheel:
            texts = [wheel.read(each).decode() for each in wheel.namelist() if each.endswith("/entry_points.txt")]
    parser = configparser.ConfigParser(delimiters="=")
    parser.read_string("\n".join(texts))
    for group in parser.sections():
        for name, value in parser[group].items():
            if group == "torchrun.logs_specs" or value.startswith("torch.distributed.run"):
                yield f"{group}: {name} = {value}"


def _constants(nodes: Sequence[ast.expr | None]) -> Iterator[str]:
    """The constant texts among these."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Module:
    """The syntax of one module."""

    def __init__(self, name: str, tree: ast.Module, is_package: bool = False) -> None:
        self.name = name
        self.tree = tree
        self.is_package = is_package
        self.constants: dict[str, Any] = {}
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        """Name to the module and the name that it comes from, of torch's own."""
        self.public: list[str] | None = None
        for node in self._top(tree.body):
            self._enter(node)

    def _top(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, (ast.If, ast.Try)):
                yield from self._top(node.body)

    def _enter(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.defined[name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name == "__all__":
                    self.public = list(self.value(value))
                self.constants[name] = self.value(value)
                self.defined.setdefault(name, node)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.constants[name] = self.value(value)
                self.defined.setdefault(name, node)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = self.name.split(".")[: -level + self.is_package or None] if level else []
                home = ".".join([*above, *([module.removeprefix("torch.")] if module else [])])
                self.imported |= {each.asname or each.name: (home, each.name) for each in names}

    def value(self, node: ast.expr | None) -> Any:
        """A literal, or a constant of this module; UNKNOWN for the rest."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        try:
            return ast.literal_eval(node) if node is not None else Parameter.empty
        except (ValueError, TypeError):
            return UNKNOWN

    def flags(self) -> Iterator[TheirFlag]:
        """The arguments of its parser."""
        for node in ast.walk(self.tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")):
                continue
            spellings = tuple(_constants(node.args))
            given = {each.arg: each.value for each in node.keywords}
            action = ast.unparse(given["action"]).strip("'\"") if "action" in given else "store"
            reads = ast.unparse(given["type"]) if "type" in given else "str"
            if action in ("store_true", "check_env"):
                reads = "switch"
            choices = self.value(given.get("choices"))
            yield TheirFlag(
                spellings,
                reads,
                self.value(given.get("default")),
                tuple(choices) if isinstance(choices, (list, tuple)) else (),
                action in ("env", "check_env"),
                hashlib.sha256(ast.unparse(given["help"]).encode()).hexdigest()[:12] if "help" in given else "",
            )

    def keys_of(self, variable: str) -> Iterator[str]:
        """Constant keys of a dict of this name: those that it is made with, and those that are set later."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == variable:
                    yield from _constants(keys)
                case ast.Subscript(ctx=ast.Store(), slice=ast.Constant(value=str(key))):
                    if ast.unparse(node.value).startswith(variable):
                        yield key

    def keys(self) -> Iterator[str]:
        """All constant keys of dicts."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Dict(keys=keys):
                    yield from _constants(keys)
                case ast.Subscript(slice=ast.Constant(value=str(key))):
                    yield key

    def environment(self) -> Iterator[str]:
        """Variables that it reads or asks for."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Call(func=func, args=[first, *_]) if ast.unparse(func) in ("os.environ.get", "os.getenv"):
                    name = self.value(first)
                case ast.Subscript(value=held, slice=first) if ast.unparse(held) == "os.environ":
                    name = self.value(first)
                case ast.Compare(left=first, comparators=[held]) if ast.unparse(held) == "os.environ":
                    name = self.value(first)
                case _:
                    continue
            if isinstance(name, str):
                yield name

    def options(self) -> Iterator[str]:
        """Keys that it looks up among the options of a rendezvous."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr=attr), args=[ast.Constant(value=str(key)), *_]) if (
                    attr in _ASKS and ast.unparse(owner).split(".")[0] in _PARAMETERS
                ):
                    yield key
                case ast.Compare(left=ast.Constant(value=str(key)), comparators=[held]):
                    if ast.unparse(held).endswith("params.config"):
                        yield key
                case ast.Call(func=ast.Name(id="_get_timeout"), args=[_, ast.Constant(value=str(key))]):
                    yield f"{key}_timeout"

    def texts(self, pattern: re.Pattern[str]) -> Iterator[str]:
        """Constant texts that match in whole, also within f-strings."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value):
                yield node.value


class _Reader:
    """Resolves names over modules."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self._modules = modules

    def calls(self) -> dict[tuple[str, str], Call]:
        """Every public name of every module."""
        found = {}
        for name, module in self._modules.items():
            for each in self._public(module):
                home, node = self._home(name, each)
                if node is not None:
                    found[name, each] = self._call(home, node) if home == name else Call(SAME, None, {})
        return found

    def _public(self, module: Module) -> list[str]:
        if module.public is not None:
            return module.public
        names = [*module.defined, *(module.imported if module.is_package else ())]
        return [name for name in names if not name.startswith("_") and name not in ("logger", "log")]

    def _home(self, module: str, name: str) -> tuple[str, ast.stmt | None]:
        own = self._modules[module]
        if name in own.defined:
            return module, own.defined[name]
        where, original = own.imported.get(name, ("", ""))
        return self._home(where, original) if where in self._modules else (module, None)

    def _call(self, module: str, node: ast.stmt) -> Call:
        match node:
            case ast.FunctionDef():
                return Call("function", self._parameters(module, node.args), {})
            case ast.ClassDef():
                return self._class(module, node)
            case ast.Assign(value=ast.Call(func=maker)) if ast.unparse(maker).endswith(("namedtuple", "NamedTuple")):
                return Call("class", None, {})
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                return Call("constant", None, {}, self._modules[module].constants[name])
            case _:
                return Call("constant", None, {})

    def _class(self, module: str, node: ast.ClassDef) -> Call:
        line = list(self._line(module, node))
        bases = {ast.unparse(base) for _, each in line for base in each.bases}
        members: dict[str, Call] = {}
        fields: list[Parameter] = []
        init: tuple[Parameter, ...] | None = None
        for home, each in line:  # from the first ancestor down
            made = [entry for entry in each.decorator_list if "dataclass" in ast.unparse(entry)]
            for entry in each.body:
                match entry:
                    case ast.FunctionDef(name="__init__"):
                        init = self._parameters(home, entry.args)[1:]
                        members |= dict.fromkeys(_attributes(entry), Call("constant", None, {}))
                    case ast.FunctionDef(name=name) if not name.startswith("_"):
                        members[name] = self._member(home, entry)
                    case ast.AnnAssign(target=ast.Name(id=name), value=value) if not name.startswith("_"):
                        members[name] = Call("constant", None, {})
                        if (made or "NamedTuple" in bases) and not _is_left_out(entry.annotation, value):
                            default = self._modules[home].value(value)
                            fields.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default))
                    case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                        members[name] = Call("constant", None, {})
            if made or "NamedTuple" in bases:
                init = tuple(fields)
        enumerated = any(base.endswith(("Enum", "Flag")) for base in bases)
        return Call("class", None if enumerated or "Protocol" in bases else init or (), members)

    def _line(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in node.bases:
            home, found = self._home(module, ast.unparse(base)) if isinstance(base, ast.Name) else (module, None)
            if isinstance(found, ast.ClassDef):
                yield from self._line(home, found)
        yield module, node

    def _member(self, module: str, node: ast.FunctionDef) -> Call:
        marks = {ast.unparse(each) for each in node.decorator_list}
        if any(mark.endswith(("property", ".setter")) for mark in marks):
            return Call("constant", None, {})
        return Call("function", self._parameters(module, node.args)[0 if "staticmethod" in marks else 1 :], {})

    def _parameters(self, module: str, node: ast.arguments) -> tuple[Parameter, ...]:
        value = self._modules[module].value
        simple = [*node.posonlyargs, *node.args]
        defaults = [None] * (len(simple) - len(node.defaults)) + list(node.defaults)
        found = [
            Parameter(each.arg, Parameter.POSITIONAL_OR_KEYWORD, default=value(default))
            for each, default in zip(simple, defaults, strict=True)
        ]
        if node.vararg:
            found.append(Parameter(node.vararg.arg, Parameter.VAR_POSITIONAL))
        found += [
            Parameter(each.arg, Parameter.KEYWORD_ONLY, default=value(default))
            for each, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)
        ]
        if node.kwarg:
            found.append(Parameter(node.kwarg.arg, Parameter.VAR_KEYWORD))
        return tuple(found)


def _attributes(made: ast.FunctionDef) -> Iterator[str]:
    """Public attributes that an instance is given when it is made."""
    for node in ast.walk(made):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()) if not name.startswith("_"):
                yield name


def _is_left_out(annotation: ast.expr, value: ast.expr | None) -> bool:
    """Whether a field is no argument of the class."""
    return "ClassVar" in ast.unparse(annotation) or (value is not None and "init=False" in ast.unparse(value))


# All of it as plain facts


def facts(torch: Torch) -> dict[str, str]:
    """What a torch offers, flat: two versions are compared by this."""
    found = {}
    for name, flag in torch.flags.items():
        shown = f"{' '.join(flag.spellings)} {flag.reads} {flag.default!r} {flag.choices} {flag.variable}"
        found[f"flag {name}"] = shown.replace(repr(Parameter.empty), "-")
        found[f"help of {name}"] = flag.help
    for (module, name), call in torch.calls.items():
        found |= _call_facts(f"name {module}.{name}", call)
    for kind, names in (
        ("worker variable", torch.worker_variables),
        ("variable", torch.read_variables),
        ("option", torch.options),
        ("file", torch.file_names),
        ("member of the error file", torch.error_members),
        ("entry point", torch.entry_points),
    ):
        found |= dict.fromkeys((f"{kind} {each}" for each in names), "")
    return dict(sorted(found.items()))


def _call_facts(path: str, call: Call) -> dict[str, str]:
    found = {path: repr(call.value) if isinstance(call.value, (str, int)) else call.kind}
    for place, each in enumerate(call.parameters or ()):
        default = "" if each.default is Parameter.empty else f"={each.default!r}"
        found[f"{path}({each.name})"] = f"{place}{default}"
    for name, member in call.members.items():
        found |= _call_facts(f"{path}.{name}", member)
    return found
