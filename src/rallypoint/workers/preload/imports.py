"""Imports what is to be preloaded, and reports at once which module keeps this process from being forked, and why.

Laws:

1. The process is checked after each module, so that what makes it unforkable is known by the module's name.
2. What is switched off for the imports alone is seen by no worker.
"""

from __future__ import annotations

import os
import posix
import sys

from rallypoint.workers.preload import fork_checks
from rallypoint.workers.preload.environ_recorder import EnvironRecorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

ALSO_IMPORTED = {
    # `DistributedDataParallel()`, `fully_shard()` and each optimizer import it when they are first made.
    "torch": ("torch._dynamo",),
}
"""Packages, and what these import when they are first used: that is preloaded wherever the package has been."""

THREAD_SWITCHES = {
    # Arrow's own jemalloc has a thread that gives memory back, in pyarrow and so in pandas, datasets, scikit-learn. A
    # copy has none in any case; without it, the threads that free memory give it back.
    b"JE_ARROW_MALLOC_CONF": (b"background_thread", b"background_thread:false"),
}
"""Variables that keep C libraries from starting threads: which option of theirs that is, and how it is switched off."""


class Unforkable(Exception):
    """What keeps this process from being forked.

    Args:
        module: which of the modules did it.
        why: what it did, in words.
    """

    def __init__(self, module: str, why: str) -> None:
        super().__init__(why)
        self.module = module
        self.reason = why


class Imports:
    """The imports of one process.

    Args:
        modules: what `--preload` names.
        left_out: what is not imported ahead, for it has been found unforkable before.
        path0: what the interpreter will put first on `sys.path`.
        main_file: what `__main__.__file__` will be, if that is known.
        ours: descriptors that are none of the imports'.
    """

    def __init__(
        self,
        modules: list[str],
        left_out: Collection[str],
        path0: str,
        main_file: str | None,
        ours: Collection[int],
    ) -> None:
        self._named = modules
        self._left_out = left_out
        self._path0 = path0
        self._main_file = main_file
        self._ours = ours
        self._threads: dict[str, str] = {}
        """Which module each thread was there after for the first time."""
        self.importing = ""
        """The module that is being imported."""

    def run(
        self, own: Collection[str], refused: Callable[[Unforkable], None], imported: Callable[[], None]
    ) -> EnvironRecorder:
        """Import with `sys.path` and `__main__` as the script's own imports find them.

        Args:
            own: variables that each worker has of its own.
            refused: called where one of them is read, which no import that follows can mend.
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
        """Check what a fork would lose: call this when what the imports have written has been taken.

        Raises:
            Unforkable: this process must not be forked.
        """
        why = fork_checks.thread_obstacle()
        if why:
            now = set(fork_checks.threads())
            modules = [module for thread, module in self._threads.items() if thread in now]
            raise Unforkable(modules[-1] if modules else self.importing, why)

    def packages(self) -> list[str]:
        """What was imported without being named, of which it is known that preloading it is worth while."""
        return [name for name in ALSO_IMPORTED if name in sys.modules and name not in self._named]

    def _modules(self) -> Iterator[str]:
        yield from self._named
        for package, more in ALSO_IMPORTED.items():
            if package in sys.modules:
                yield from (each for each in more if each not in self._left_out)

    def _import_one(self, module: str) -> None:
        try:
            __import__(module)
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and error.name == module and module not in self._named:
                return  # this version of the package is without it
            raise Unforkable(module, f"it raises {type(error).__name__}: {error}") from None
        why = fork_checks.fork_obstacle(self._ours)
        if why:
            raise Unforkable(module, why)
        for thread in fork_checks.threads():
            self._threads.setdefault(thread, module)


def _reading(where: str, what: str) -> str:
    return f"{where} {what} while it is imported, and each worker has its own"


def _without_threads() -> list[bytes]:
    """Switch off what `THREAD_SWITCHES` names, unless the user has decided; which variables that has changed."""
    changed = []
    for name, (option, switched_off) in THREAD_SWITCHES.items():
        given = os.environb.get(name, b"")
        if option not in given:
            _put_c_variable(name, given + b"," + switched_off if given else switched_off)
            changed.append(name)
    return changed


def _put_c_variable(name: bytes, value: bytes | None) -> None:
    """Set a variable for C code alone, which Python code does not see in `os.environ`."""
    if value is None:
        posix.unsetenv(name)
    else:
        posix.putenv(name, value)
