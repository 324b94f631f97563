"""Imports the modules to preload, and reports at once which module prevents this process from being forked, and why.

Laws:

1. The process is checked after each module, so that the module which makes it unforkable is known by name.
2. No worker sees what is switched off for the imports alone.
3. What was read from the script is imported as the script does it; an import that raises here raises there too.
"""

from __future__ import annotations

import os
import posix
import sys

from rallypoint.workers.preload import fork_checks, script_imports
from rallypoint.workers.preload.environ_recorder import EnvironRecorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

ALSO_IMPORTED = {
    # `DistributedDataParallel()`, `fully_shard()` and each optimizer import the first when they are first made.
    # The first `torch.save` and `torch.load` import the other.
    "torch": ("torch._dynamo", "torch.utils.serialization"),
}
"""Packages, and what these import on first use: that is preloaded if the package has been."""

THREAD_SWITCHES = {
    # Arrow's own jemalloc has a thread that gives memory back, in pyarrow and so in pandas, datasets, scikit-learn. A
    # copy has none in any case; without it, the threads that free memory give it back.
    b"JE_ARROW_MALLOC_CONF": (b"background_thread", b"background_thread:false"),
}
"""Variables that keep C libraries from starting threads: the option of the library, and its value for off."""


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
        modules: the modules that `--preload` names.
        left_out: modules that are not imported ahead, because they were found unforkable before.
        path0: the entry that the interpreter will put first on `sys.path`.
        main_file: the future value of `__main__.__file__`, if that is known.
        ours: descriptors that the imports have not opened.
        script: the script or module that is run, and whether it is a module, if its imports are to be imported too;
            else None.
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
        """The imports of the script: modules, and the names that are imported from each."""
        self.failures: list[tuple[str, str]] = []
        """Those of these that could not be imported, and what they raised."""
        self._left_out = left_out
        self._path0 = path0
        self._main_file = main_file
        self._ours = ours
        self._threads: dict[str, str] = {}
        """For each thread, the module after whose import it was first seen."""
        self.importing = ""
        """The module that is being imported."""

    def run(
        self, own: Collection[str], refused: Callable[[Unforkable], None], imported: Callable[[], None]
    ) -> EnvironRecorder:
        """Import with `sys.path` and `__main__` as the script's own imports find them.

        Args:
            own: variables that each worker has of its own.
            refused: called when one of them is read, which no later import can undo.
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
        """Check what a fork would lose: call this when the output of the imports has been read.

        Raises:
            Unforkable: this process must not be forked.
        """
        why = fork_checks.thread_obstacle()
        if why:
            now = set(fork_checks.threads())
            modules = [module for thread, module in self._threads.items() if thread in now]
            raise Unforkable(modules[-1] if modules else self.importing, why)

    def packages(self) -> list[str]:
        """Imported modules that were not named, and that are known to be worth preloading."""
        return [name for name in ALSO_IMPORTED if name in sys.modules and name not in self._named]

    def shown(self) -> list[str]:
        """The imports in a readable form: packages that are not of the standard library, and what they import later."""
        found = [name.partition(".")[0] for name in self._read]
        also = [each for more in ALSO_IMPORTED.values() for each in more]
        names = [each for each in (*found, *also) if each in sys.modules and each not in sys.stdlib_module_names]
        return [*dict.fromkeys((*self._named, *names))]

    def _read_script(self, target: str, is_module: bool) -> None:
        try:
            found = script_imports.in_a_copy(lambda: script_imports.installed_imports(target, is_module, ALSO_IMPORTED))
        except (OSError, ValueError) as error:
            raise Unforkable("", f"what {target} imports cannot be read ({error})") from None
        for module, names in found:
            if not self._is_left_out(module):
                self._read.setdefault(module.partition(".")[0], [])  # so that errors of a package are its own
                self._read.setdefault(module, []).extend(names)

    def _is_left_out(self, module: str) -> bool:
        return any(module == each or module.startswith(f"{each}.") for each in self._left_out)

    def _modules(self) -> Iterator[str]:
        yield from self._named
        yield from self._read
        for package, more in ALSO_IMPORTED.items():
            if package in sys.modules:
                yield from (each for each in more if each not in self._left_out)

    def _import_one(self, module: str) -> None:
        names = [each for each in self._read.get(module, ()) if not self._is_left_out(f"{module}.{each}")]
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
        why_not = fork_checks.fork_obstacle(self._ours)
        if why_not:
            raise Unforkable(module, why_not)
        for thread in fork_checks.threads():
            self._threads.setdefault(thread, module)


def _reading(where: str, what: str) -> str:
    return f"{where} {what} while it is imported, and each worker has its own"


def _without_threads() -> list[bytes]:
    """Switch off what `THREAD_SWITCHES` names, unless the user has decided. Returns the changed variables."""
    changed = []
    for name, (option, switched_off) in THREAD_SWITCHES.items():
        given = os.environb.get(name, b"")
        if option not in given:
            _put_c_variable(name, given + b"," + switched_off if given else switched_off)
            changed.append(name)
    return changed


def _put_c_variable(name: bytes, value: bytes | None) -> None:
    """Set a variable for C code only, which Python code does not see in `os.environ`."""
    if value is None:
        posix.unsetenv(name)
    else:
        posix.putenv(name, value)
