"""Imports the modules to preload. Reports at once, with the reason, a module that makes this process unforkable.

A fork copies memory and one thread. It copies no other thread (their locks stay locked forever), no accelerator's
context, and no child. All copies would share sockets, pipes, event loops and shared memory, and so the locks and queues
of `multiprocessing`.

Laws:

1. The process is checked after each module, so that a harmful module's name is known.
2. No worker sees features that are disabled only for the imports.
3. Modules found in the script are imported as the script does; an import that raises here also raises there.
4. Per-worker variables must not be read. They are unset, so code that copies all variables does not find them. A reader
   is reported at once, since no later import could help.
5. Threads that their library ends before each fork (as OpenBLAS does with pthread_atfork) are no obstacle. A trial fork
   shows this: they are gone after it.

For `auto`, this module finds a script's imports in the source, without executing it. It recursively reads the script
and the user's own modules: the top level with everything executed there (`if`, `try`, classes, ...), and functions
whose names are used in the code that was read. Modules of the standard library and of installed distributions can be
imported ahead. The user's own modules never are: importing them might do anything, and they change between starts.

Laws:

1. Imports under `if TYPE_CHECKING`, or in an unused function, are not imported ahead.
2. Reading never raises: a file that is not Python has no imports.
3. At most `MAX_FILES` files are read, each of at most `MAX_SIZE` bytes.
4. Modules that are not built in are imported where they are used: the zygote imports this file, and must not have them.
"""

from __future__ import annotations

import os
import posix
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from types import FrameType
    from typing import Any


ALSO_IMPORTED = {
    # `DistributedDataParallel()`, `fully_shard()` and each optimizer import the first module on first use; `torch.save`
    # and `torch.load` import the second.
    "torch": ("torch._dynamo", "torch.utils.serialization"),
}
"""Packages, and the modules that they import on first use, which are preloaded with the package."""

THREAD_SWITCHES = {
    # Arrow's own jemalloc has a thread that returns memory, in pyarrow and so in pandas, datasets, scikit-learn. No
    # copy has this thread; without it, the freeing threads return memory.
    b"JE_ARROW_MALLOC_CONF": (b"background_thread", b"background_thread:false"),
}
"""Variables that keep C libraries from starting threads: the library's option, and its value for "off"."""

_SIGKILL = 9
_FORK_TEST_TIMEOUT = 5.0
"""Seconds for a copy that ends at once."""
_DEVICES = (
    *("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci", "/dev/habanalabs", "/dev/neuron"),
    *("/dev/vfio/", "/dev/infiniband/"),
)
_SHARED = (
    *("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[io_uring]", "anon_inode:inotify"),
    *("anon_inode:[eventfd]", "anon_inode:[timerfd]", "anon_inode:[signalfd]"),
)
_STANDARD = (0, 1, 2)
"""The standard descriptors, replaced in each copy."""
_OPENMP_REGISTRATION = "/dev/shm/__KMP_REGISTERED_LIB_"
"""The file with which LLVM's and Intel's OpenMP detect a second one in a process; they recreate it in each copy."""
_INITIALIZED = (("torch", "cuda"), ("torch", "xpu"), ("torch", "npu"), ("torch", "hpu"))
_MAX_THREADS = 3
"""Maximum number of threads named in a message."""


READ_TOO_EARLY = "while it is imported, and each worker has its own"
"""End of the reason if a module reads a per-worker variable."""


class Unforkable(Exception):
    """The reason why this process must not be forked.

    Args:
        module: the module that caused it.
        why: what it did, as text.
    """

    def __init__(self, module: str, why: str) -> None:
        super().__init__(why)
        self.module = module
        self.reason = why


class Imports:
    """The imports of one process.

    Args:
        modules: the modules from the flag.
        left_out: modules that earlier proved unforkable, and are not imported ahead.
        path0: the entry that the interpreter will put first on `sys.path`.
        main_file: the future value of `__main__.__file__`, if known.
        ours: descriptors not opened by the imports.
        script: the script or module to run, and whether it is a module, to import its imports too; otherwise None.
    """

    def __init__(
        self,
        modules: list[str],
        left_out: Collection[str],
        path0: str,
        main_file: str | None,
        ours: Collection[int],
        script: tuple[str, bool] | None = None,
    ) -> None:
        self._named = modules
        self._script = script
        self._read: dict[str, list[str]] = {}
        """The script's imports: modules, with the names imported from each."""
        self.failures: list[tuple[str, str]] = []
        """The script's failed imports, with their errors."""
        self._left_out = left_out
        self._path0 = path0
        self._main_file = main_file
        self._ours = ours
        self._threads: dict[str, str] = {}
        """For each thread, the module whose import started it."""
        self.importing = ""
        """The module that is currently being imported."""

    def run(
        self, own: Collection[str], refused: Callable[[Unforkable], None], imported: Callable[[], None]
    ) -> EnvironRecorder:
        """Import with the `sys.path` and `__main__` of the script's own imports.

        Args:
            own: the per-worker variables.
            refused: called when one of them is read, which is final.
            imported: called after each module.

        Raises:
            Unforkable: this process must not be forked.
        """
        recording = EnvironRecorder(own, lambda where, what: refused(Unforkable(self.importing, _reading(where, what))))
        main = sys.modules["__main__"]
        switched_off = _without_threads()
        added = not getattr(sys.flags, "safe_path", False)
        if added:
            sys.path.insert(0, self._path0)
        if self._script is not None:
            self._read_script(*self._script)
        if self._main_file is not None:
            setattr(main, "__file__", self._main_file)  # noqa: B010
        with recording:
            for module in self._modules():
                self.importing = module
                self._import_one(module)
                if added and sys.path[0] != self._path0:
                    raise Unforkable(module, "it puts something before the script's folder on sys.path")
                imported()
        if self._main_file is not None:
            del main.__file__
        if added:
            del sys.path[0]
            if self._path0 not in sys.path:
                sys.path_importer_cache.pop(self._path0, None)
        for name in switched_off:
            _put_c_variable(name, os.environb.get(name))
        return recording

    def check_threads(self) -> None:
        """Check what a fork would lose. Call this after reading the imports' output.

        Raises:
            Unforkable: this process must not be forked.
        """
        why = thread_obstacle()
        if why:
            now = set(threads())
            modules = [module for thread, module in self._threads.items() if thread in now]
            raise Unforkable(modules[-1] if modules else self.importing, why)

    def packages(self) -> list[str]:
        """Imported modules that were not named but are known to be worth preloading."""
        return [name for name in ALSO_IMPORTED if name in sys.modules and name not in self._named]

    def shown(self) -> list[str]:
        """The imports in readable form: packages outside the standard library, and their later imports."""
        found = [name.partition(".")[0] for name in self._read]
        also = [name for more in ALSO_IMPORTED.values() for name in more]
        names = [name for name in (*found, *also) if name in sys.modules and name not in sys.stdlib_module_names]
        return [*dict.fromkeys((*self._named, *names))]

    def _read_script(self, target: str, is_module: bool) -> None:
        try:
            found = in_a_copy(lambda: installed_imports(target, is_module, ALSO_IMPORTED))
        except (OSError, ValueError) as error:
            raise Unforkable("", f"the imports of {target} cannot be read ({error})") from None
        for module, names in found:
            if not self._is_left_out(module):
                self._read.setdefault(module.partition(".")[0], [])  # so that a package's errors count as its own
                self._read.setdefault(module, []).extend(names)

    def _is_left_out(self, module: str) -> bool:
        return any(module == left_out or module.startswith(f"{left_out}.") for left_out in self._left_out)

    def _modules(self) -> Iterator[str]:
        yield from self._named
        yield from self._read
        for package, more in ALSO_IMPORTED.items():
            if package in sys.modules:
                yield from (name for name in more if name not in self._left_out)

    def _import_one(self, module: str) -> None:
        names = [name for name in self._read.get(module, ()) if not self._is_left_out(f"{module}.{name}")]
        try:
            __import__(module, fromlist=names)
        except BaseException as error:
            why = f"it raises {type(error).__name__}: {error}"
            if module in self._named or not isinstance(error, Exception):
                raise Unforkable(module, why) from None
            if module in self._read:
                self.failures.append((module, why))
            elif not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
                raise Unforkable(module, why) from None
        why_not = fork_obstacle(self._ours)
        if why_not:
            raise Unforkable(module, why_not)
        for thread in threads():
            self._threads.setdefault(thread, module)


def _reading(where: str, what: str) -> str:
    return f"{where} {what} {READ_TOO_EARLY}"


def _without_threads() -> list[bytes]:
    """Apply `THREAD_SWITCHES`, unless the user set them. Returns the changed variables."""
    changed = []
    for name, (option, switched_off) in THREAD_SWITCHES.items():
        given = os.environb.get(name, b"")
        if option not in given:
            _put_c_variable(name, given + b"," + switched_off if given else switched_off)
            changed.append(name)
    return changed


def _put_c_variable(name: bytes, value: bytes | None) -> None:
    """Set a variable for C code only, invisible in `os.environ`."""
    if value is None:
        posix.unsetenv(name)
    else:
        posix.putenv(name, value)


# The environment during the imports


class EnvironRecorder:
    """While entered, records each variable that Python code reads from `os.environ`.

    `read` contains the names, set or not, with the file and line of the first reader; a loop over the variables reads
    all existing ones. `changed` contains the variables that the imports set (None: removed), known at the end. Reads by
    C code are invisible.

    Args:
        own: names of the per-worker variables.
        refuse: called when one of these is read, with file and line and a text about the read.
    """

    def __init__(self, own: Collection[str], refuse: Callable[[str, str], None]) -> None:
        self.read: dict[str, str] = {}
        self.changed: dict[bytes, bytes | None] = {}
        self._own = frozenset(own)
        self._refuse = refuse

    def __enter__(self) -> EnvironRecorder:
        self._before = dict(os.environb)
        self._kind: Any = type(os.environ)
        self._original = original = self._kind.__getitem__
        self._original_names = names = self._kind.__iter__
        self._theirs = {original.__code__.co_filename, self._kind.get.__code__.co_filename}

        def noted(environ: Any, name: Any) -> Any:
            if isinstance(name, (str, bytes)):
                self._note(name)
            return original(environ, name)

        def went_through(environ: Any) -> Any:
            found = list(names(environ))
            for name in found:
                self._note(name)
            return iter(found)

        setattr(self._kind, "__getitem__", noted)  # noqa: B010 - no type checker lets a method be assigned
        setattr(self._kind, "__iter__", went_through)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._kind, "__getitem__", self._original)  # noqa: B010
        setattr(self._kind, "__iter__", self._original_names)  # noqa: B010
        after = dict(os.environb)
        names = {*self._before, *after}
        self.changed = {name: after.get(name) for name in names if self._before.get(name) != after.get(name)}

    def _note(self, given: str | bytes) -> None:
        name = os.fsdecode(given)
        if name in self.read:
            return
        self.read[name] = where = _location(self._reader())
        if name in self._own:
            self._refuse(where, f"reads {name}")

    def _reader(self) -> FrameType:
        """The reader: the first frame outside this module and the implementation of `os.environ`."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename in (*self._theirs, __file__):
            frame = frame.f_back
        return frame


def _location(frame: FrameType) -> str:
    """The file and line of a frame; the file is relative to its folder of `sys.path`."""
    path = frame.f_code.co_filename
    roots = [root for root in sys.path if root and path.startswith(f"{root.rstrip('/')}/")]
    root = max(roots, key=len, default="").rstrip("/")
    return f"{path[len(root) + 1 :] if root else path}:{frame.f_lineno}"


def replace(environ: Iterable[tuple[bytes, bytes]], changed: dict[bytes, bytes | None]) -> None:
    """Replace this process's variables with these, and apply the imports' changes."""
    os.environ.clear()
    for name, value in environ:
        os.environb[name] = value
    for name, new in changed.items():
        if new is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = new


# Whether this process may be forked


def fork_obstacle(ours: Collection[int] = ()) -> str | None:
    """Why the imports prevent a fork, as text; None if no reason is found. Does not fork.

    Args:
        ours: descriptors not opened by the imports.
    """
    return _accelerator() or _child() or _descriptor(ours) or _memory()


def threads() -> list[str]:
    """The kernel's numbers of the threads of this process."""
    return posix.listdir("/proc/self/task")


def _accelerator() -> str | None:
    for package, name in _INITIALIZED:
        module = getattr(sys.modules.get(package), name, None)
        asked = getattr(module, "is_initialized", None)
        if asked is not None and asked():
            return f"it initializes {package}.{name}"
    for target in _open().values():
        if target.startswith(_DEVICES):
            return f"it opens the device {target}"
    return None


def _child() -> str | None:
    try:
        posix.waitid(posix.P_ALL, 0, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT)
    except ChildProcessError:
        return None
    return "it starts a process that continues"


def _descriptor(ours: Collection[int]) -> str | None:
    for fd, target in _open().items():
        if fd not in ours and fd not in _STANDARD and target.startswith(_SHARED):
            return f"it opens a descriptor that copies would share ({target})"
    return None


def _memory() -> str | None:
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            name = fields[5].decode(errors="replace").rstrip() if len(fields) > 5 else "without a name"
            if fields[1].endswith(b"s") and b"w" in fields[1] and not name.startswith(_OPENMP_REGISTRATION):
                return f"it maps memory that copies would share ({name})"
    return None


def thread_obstacle() -> str | None:
    """A text about threads that remain after a fork or prevent it; None if there are none.

    Fork hooks can write output: read the imports' output first.
    """
    if len(threads()) == 1:
        return None
    reading, writing = posix.pipe()
    pid = posix.fork()
    if pid == 0:
        posix._exit(0)  # which closes the pipe
    posix.close(writing)
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    ended = bool(poller.poll(_FORK_TEST_TIMEOUT * 1000))
    if not ended:
        posix.kill(pid, _SIGKILL)
    posix.waitpid(pid, 0)
    posix.close(reading)
    if not ended:
        return "a test copy is hung"
    more = len(threads()) - 1
    return (
        f"it starts {more} thread{'s' * (more > 1)} that stay{'s' * (more == 1)}: {_describe_threads()}"
        if more
        else None
    )


def _open() -> dict[int, str]:
    found = {}
    for name in posix.listdir("/proc/self/fd"):
        try:
            found[int(name)] = posix.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor used for listing
            continue
    return found


def _describe_threads() -> str:
    """All threads except the main one: their names, and the line of Python threads."""
    main = posix.getpid()
    found = [int(task) for task in posix.listdir("/proc/self/task") if int(task) != main]
    words = [_python_thread(thread_id) or _thread_name(thread_id) for thread_id in found[:_MAX_THREADS]]
    return ", ".join(words) + (", ..." if len(found) > _MAX_THREADS else "")


def _thread_name(thread: int) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # the thread ended
        return "one that has ended"


def _python_thread(thread: int) -> str:
    """The name of a Python thread, and the file and line of its own code."""
    threading = sys.modules.get("threading")
    if threading is None:
        return ""
    found = [candidate for candidate in threading.enumerate() if candidate.native_id == thread]
    if not found:
        return ""
    frame: FrameType | None = sys._current_frames().get(found[0].ident)
    where = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            where = f" at {_location(frame)}"
        frame = frame.f_back
    return f"{found[0].name}{where}"


if TYPE_CHECKING:
    import ast
    from collections import deque
    from collections.abc import Callable, Iterable
    from importlib.machinery import ModuleSpec as _Spec

    Found = list[tuple[str, list[str]]]
    """Modules, with the names imported from each, which can also be modules."""

MAX_FILES = 200
MAX_SIZE = 1 << 20

_INSTALLED = ("site-packages", "dist-packages")


class Reader:
    """Finds the imports in given sources; visits each node once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        """Names used in executed code."""
        self._waiting: dict[str, list[tuple[list[ast.stmt], str]]] = {}
        """Functions not yet used, each with its package."""

    def read(self, text: bytes, package: str = "") -> list[tuple[str, list[str]]]:
        """Find the modules imported now, in order, each with the names imported from it.

        Args:
            text: the contents of a file.
            package: the base of its relative imports; empty for a script.

        Raises:
            SyntaxError, ValueError: the text is not Python.
        """
        import ast

        found: list[tuple[str, list[str]]] = []
        frontier: list[tuple[ast.AST, str, str]] = [(ast.parse(text), package, "")]
        while frontier:
            node, package, owner = frontier.pop()
            if isinstance(node, ast.Import):
                found += [(alias.name, []) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = _absolute(node.module or "", node.level, package)
                found += [(module, [alias.name for alias in node.names if alias.name != "*"])] if module else []
            inner = node.name if isinstance(node, ast.ClassDef) else ""
            called = [(call, package, inner) for call in self._executed(node, package, owner)]
            name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
            self._used.add(name)
            bodies = self._waiting.pop(name, [])
            called += [(statement, package, "") for body, package in bodies for statement in body]
            frontier += reversed(called)
        return found

    def _executed(self, node: ast.AST, package: str, owner: str) -> list[ast.AST]:
        """The executed parts of a node, as far as known; `owner` is the class around it."""
        import ast

        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            special = owner and node.name.startswith("__") and node.name.endswith("__")
            caller = owner if special else node.name
            called = bool(node.decorator_list) or caller in self._used
            if not called:
                self._waiting.setdefault(caller, []).append((node.body, package))
            return [*node.decorator_list, *node.args.defaults, *(node.body if called else ())]
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" in (getattr(node.test, "attr", ""), getattr(node.test, "id", "")):
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


def installed_imports(target: str, is_module: bool, known: Iterable[str] = ()) -> Found:
    """Find the installed modules that a script imports, in order; modules are looked up on `sys.path`.

    Args:
        target: the path of a script or of a folder with a `__main__.py`, or the name of a module.
        is_module: whether `target` is a module's name.
        known: packages that always count as installed.

    Raises:
        OSError, SyntaxError, ValueError: the script is unreadable, so its imports are unknown.
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
    """The files to read, and how to find them."""

    def __init__(self, known: frozenset[str]) -> None:
        from collections import deque

        self.imports: deque[tuple[str, list[str]]] = deque()
        """Imports that were found but not followed yet."""
        self._reader = Reader()
        self._read: set[str] = set()
        self._known = known
        self._seen: dict[str, bool] = {}
        self._stdlib = os.path.dirname(os.__file__)

    def add_main(self, target: str, is_module: bool) -> None:
        """Read the main file. Raises like `installed_imports`."""
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
            raise ValueError(f"the module {name} does not exist or has no source file")
        for spec in chain[:-1]:
            self._add(spec)
        return str(chain[-1].origin), name.rpartition(".")[0]

    def follow(self, module: str, names: list[str]) -> bool:
        """Read a module if it is the user's own. Returns whether it is installed.

        Args:
            module: its name.
            names: the names imported from it; modules among them are read too.
        """
        installed = self._follow_one(module)
        if installed is False:
            for name in names:
                self._follow_one(f"{module}.{name}")
        return bool(installed)

    def _follow_one(self, name: str) -> bool | None:
        """Whether a module is an installed one; None if it does not exist."""
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
            place.startswith(self._stdlib + os.sep) or any(folder in place.split(os.sep) for folder in _INSTALLED)
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
    """The specs of a module's packages, outermost first, and its own; empty if it does not exist."""
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
                # A namespace package: its members are looked up through the outer package, which must be in
                # `sys.modules`.
                path = list(getattr(path, "_path", ()))
                sys.modules[spec.name] = module = type(sys)(spec.name)
                setattr(module, "__path__", path)  # noqa: B010
                there.append(spec.name)
    finally:
        for name in there:
            del sys.modules[name]
    return found


def _find_one(name: str, path: list[str] | None) -> _Spec | None:
    for finder in sys.meta_path:
        try:
            spec: _Spec | None = finder.find_spec(name, path)
        except Exception:  # a foreign finder can raise anything
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
    """Call a function in a fork of this process, so that it leaves no traces here, and return its result.

    Raises:
        ValueError: the function raised an exception, whose text this contains, or ended the copy.
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
        raise ValueError("the process that reads it has exited")
    why, found = marshal.loads(data)
    if why:
        raise ValueError(why)
    return [(module, names) for module, names in found]
