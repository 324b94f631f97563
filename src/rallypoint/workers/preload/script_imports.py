"""Finds the imports of a script in its source, without executing any of it: for `--preload=auto`.

It reads the script and the user's own modules that it imports, recursively: the top level, with everything that is
executed there (`if`, `try`, classes, ...), and functions whose names are used by anything that is read. It finds two
kinds of modules: those of the standard library and of installed distributions, which may be imported ahead, and the
user's own, which never are: they may do anything when they are imported, and change from start to start.

Laws:

1. Imports under `if TYPE_CHECKING`, or in a function that nothing names, are not imported ahead.
2. Reading never raises: a file that is not Python has no imports.
3. At most `MAX_FILES` files are read, each of at most `MAX_SIZE` bytes.
4. Modules that are not built in are imported where they are used: the zygote imports this file and must not have them.
"""

from __future__ import annotations

import os
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections import deque
    from collections.abc import Callable, Iterable
    from importlib.machinery import ModuleSpec as _Spec

    Found = list[tuple[str, list[str]]]
    """Modules, and the names that are imported from each: a name may be a module too."""

MAX_FILES = 200
MAX_SIZE = 1 << 20

_INSTALLED = ("site-packages", "dist-packages")


class Reader:
    """Finds the imports of the sources that it is given; looks at each node of these once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        """Names that are used in anything that is executed."""
        self._waiting: dict[str, list[tuple[list[ast.stmt], str]]] = {}
        """Functions that nothing has named yet, each with its package."""

    def read(self, text: bytes, package: str = "") -> list[tuple[str, list[str]]]:
        """The modules that are imported now, in order, each with the names that are imported from it.

        Args:
            text: the contents of a file.
            package: the package that its relative imports start from; empty for a script.

        Raises:
            SyntaxError, ValueError: it is not Python.
        """
        import ast

        found: list[tuple[str, list[str]]] = []
        frontier: list[tuple[ast.AST, str, str]] = [(ast.parse(text), package, "")]
        while frontier:
            node, package, owner = frontier.pop()
            if isinstance(node, ast.Import):
                found += [(each.name, []) for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = _absolute(node.module or "", node.level, package)
                found += [(module, [each.name for each in node.names if each.name != "*"])] if module else []
            inner = node.name if isinstance(node, ast.ClassDef) else ""
            called = [(each, package, inner) for each in self._executed(node, package, owner)]
            bodies = self._use(node.id if isinstance(node, ast.Name) else getattr(node, "attr", ""))
            called += [(each, package, "") for body, package in bodies for each in body]
            frontier += reversed(called)
        return found

    def _use(self, name: str) -> list[tuple[list[ast.stmt], str]]:
        self._used.add(name)
        return self._waiting.pop(name, [])

    def _executed(self, node: ast.AST, package: str, owner: str) -> list[ast.AST]:
        """The parts of a node that are executed, as far as that is known; `owner` is the class whose body it is in."""
        import ast

        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            special = owner and node.name.startswith("__") and node.name.endswith("__")
            caller = owner if special else node.name
            called = bool(node.decorator_list) or caller in self._used
            if not called:
                self._waiting.setdefault(caller, []).append((node.body, package))
            return [*node.decorator_list, *node.args.defaults, *(node.body if called else ())]
        if isinstance(node, ast.If):
            if _is_type_checking(node.test):
                return list(node.orelse)
            if isinstance(node.test, ast.Constant):
                return list(node.body if node.test.value else node.orelse)
        return list(ast.iter_child_nodes(node))


def _absolute(module: str, level: int, package: str) -> str:
    """The absolute name of an import; empty if it is relative to nothing."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if len(parts) < level:
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "attr", ""), getattr(test, "id", ""))


def installed_imports(target: str, is_module: bool, known: Iterable[str] = ()) -> Found:
    """The installed modules that a script imports, in order; modules are looked up on `sys.path`.

    Args:
        target: the path of a script or of a folder with a `__main__.py`, or the name of a module.
        is_module: whether it is the latter.
        known: packages that count as installed wherever they are.

    Raises:
        OSError, SyntaxError, ValueError: it cannot be read, so its imports are unknown.
    """
    files = _Files(frozenset(known))
    files.add_main(target, is_module)
    found: dict[str, dict[str, None]] = {}
    while files.imports:
        module, names = files.imports.popleft()
        if files.follow(module, names):
            found.setdefault(module, {}).update(dict.fromkeys(names))
    return [(module, list(names)) for module, names in found.items()]


class _Files:
    """The files that are read, and how they are found."""

    def __init__(self, known: frozenset[str]) -> None:
        from collections import deque

        self.imports: deque[tuple[str, list[str]]] = deque()
        """Imports that were read and have not been followed."""
        self._reader = Reader()
        self._read: set[str] = set()
        self._known = known
        self._seen: dict[str, bool] = {}
        self._stdlib = os.path.dirname(os.__file__)

    def add_main(self, target: str, is_module: bool) -> None:
        """Read the main file. Raises as `installed_imports` does."""
        path, package = target, ""
        if is_module:
            path, package = self._main_module(target)
        elif os.path.isdir(target):
            path = os.path.join(target, "__main__.py")
        self._read.add(path)
        self.imports += self._reader.read(_text(path), package)

    def _main_module(self, name: str) -> tuple[str, str]:
        chain = _find(name)
        if chain and chain[-1].submodule_search_locations is not None:
            chain, name = _find(f"{name}.__main__"), f"{name}.__main__"
        if not chain or not chain[-1].has_location:
            raise ValueError(f"there is no module {name} with a source")
        for spec in chain[:-1]:
            self._add(spec)
        return str(chain[-1].origin), name.rpartition(".")[0]

    def follow(self, module: str, names: list[str]) -> bool:
        """Read a module if it is the user's own. Returns whether it is an installed one.

        Args:
            module: its name.
            names: what is imported from it; those that are modules are read too.
        """
        installed = self._follow_one(module)
        if installed is False:
            for name in names:
                self._follow_one(f"{module}.{name}")
        return bool(installed)

    def _follow_one(self, name: str) -> bool | None:
        """Whether a module is an installed one; None if there is none."""
        if name not in self._seen:
            chain = _find(name)
            if not chain:
                return None
            self._seen[name] = self._is_installed(chain)
            if not self._seen[name]:
                for spec in chain:
                    self._add(spec)
        return self._seen[name]

    def _is_installed(self, chain: list[_Spec]) -> bool:
        top = chain[0]
        if top.name in self._known or (not top.has_location and top.origin in ("built-in", "frozen")):
            return True
        places = [str(top.origin)] if top.has_location else getattr(top.submodule_search_locations, "_path", ())
        return any(
            place.startswith(self._stdlib + os.sep) or any(each in place.split(os.sep) for each in _INSTALLED)
            for place in places
        )

    def _add(self, spec: _Spec) -> None:
        path = str(spec.origin)
        if not spec.has_location or not path.endswith(".py") or path in self._read or len(self._read) >= MAX_FILES:
            return
        package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
        self._read.add(path)
        try:
            self.imports += self._reader.read(_text(path), package)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return


def _find(name: str) -> list[_Spec]:
    """The specs of the packages that a module is in, the outermost first, and its own; empty if there is none."""
    found: list[_Spec] = []
    path: list[str] | None = None
    there: list[str] = []
    try:
        for end in [at for at, letter in enumerate(name) if letter == "."] + [len(name)]:
            spec = None if found and path is None else _find_one(name[:end], path)
            if spec is None:
                return []
            found.append(spec)
            path = spec.submodule_search_locations
            if path is not None and not spec.has_location and spec.name not in sys.modules:
                # A namespace package: its members are looked up by the outer package, which must be in `sys.modules`.
                path = list(getattr(path, "_path", ()))
                sys.modules[spec.name] = module = type(sys)(spec.name)
                setattr(module, "__path__", path)  # noqa: B010
                there.append(spec.name)
    finally:
        for each in there:
            del sys.modules[each]
    return found


def _find_one(name: str, path: list[str] | None) -> _Spec | None:
    for finder in sys.meta_path:
        try:
            spec: _Spec | None = finder.find_spec(name, path)
        except Exception:  # whatever a foreign finder does
            continue
        if spec is not None:
            return spec
    return None


def _text(path: str) -> bytes:
    with open(path, "rb") as file:
        text = file.read(MAX_SIZE + 1)
    if len(text) > MAX_SIZE:
        raise ValueError(f"it is longer than {MAX_SIZE} bytes")
    return text


def in_a_copy(work: Callable[[], Found]) -> Found:
    """Call a function in a copy of this process, so that it leaves nothing here, and return its result.

    Raises:
        ValueError: it has raised an exception, whose text this has; or it has ended the copy.
    """
    import marshal

    reading, writing = posix.pipe()
    pid = posix.fork()
    if pid == 0:
        try:
            try:
                answer = "", work()
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}", []
            with open(writing, "wb") as file:
                file.write(marshal.dumps(answer))
        finally:
            posix._exit(0)
    posix.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    posix.waitpid(pid, 0)
    if not data:
        raise ValueError("the process that reads it has ended")
    why, found = marshal.loads(data)
    if why:
        raise ValueError(why)
    return [(module, names) for module, names in found]
