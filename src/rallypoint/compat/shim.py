"""Replaces torch's launcher with Rallypoint in programs that import it or run it with `python -m` (`rallyctl shim`).

The file that `rallyctl shim` puts into an environment asks `find` for the modules in `MODULES`. Until then, it imports
nothing from Rallypoint.

Laws:

1. Four torch modules are replaced: `run`, `launch`, `launcher` and `launcher.api`. `python -m` with one of the first
   two runs our command, without importing torch in that process.
2. Their names are those of `rallypoint.compat`. Launches happen here; a program may pass torch's objects (log specs,
   NUMA options) and catch torch's exceptions.
3. A program that derives classes from torch's elastic classes, or patches them or the launcher, keeps torch's own
   launcher: ours would ignore its changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import copy_context
from functools import cache, wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType

from rallypoint.agent.launch import LaunchConfig, announce
from rallypoint.base.light_typing import Any
from rallypoint.base.log import configure, get_logger
from rallypoint.base.numa import NumaOptions
from rallypoint.workers.logs.specs import DefaultLogsSpecs, LogsSpecs, Std

_log = get_logger(__name__)

MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.launcher.api",
)
_PARENTS = ("torch", "torch.distributed")
_PROGRAMS = MODULES[:2]
_LAUNCHING = frozenset({"elastic_launch", "launch", "launch_agent", "main", "run"})
"""Names that start a launch."""

_ELASTIC = "torch.distributed.elastic"
_ERRORS = {
    "ChildFailedError": f"{_ELASTIC}.multiprocessing.errors",
    "SignalException": f"{_ELASTIC}.multiprocessing.api",
}
_ERRORS |= dict.fromkeys(
    (
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousError",
        "RendezvousGracefulExitError",
        "RendezvousStateError",
        "RendezvousTimeoutError",
    ),
    f"{_ELASTIC}.rendezvous.api",
)
"""Exceptions of a launch for which torch has a class, with its module."""
_KNOWN = sys.stdlib_module_names | {"etcd", "rallypoint", "torch", "typing_extensions", "urllib3"}
"""Packages whose functions and classes torch's modules contain if nobody changed them."""

_torchs: dict[str, ModuleType] = {}
"""Torch's own modules, loaded when needed."""
_finding_torchs = False


def find(name: str) -> ModuleSpec | None:
    """Find one of torch's modules; None leaves it to torch."""
    if name in _PARENTS:
        return ModuleSpec(name, _Parents(), is_package=True) if _is_run_by_python() else None
    if name not in MODULES or _finding_torchs:
        return None
    return ModuleSpec(name, _InPlaceLoader(), is_package=name == "torch.distributed.launcher")


def _is_run_by_python() -> bool:
    """Whether this is `python -m torch.distributed.run`, before Python has imported that module."""
    if sys.argv[:1] != ["-m"] or len(sys.orig_argv) <= len(sys.argv):
        return False
    word = sys.orig_argv[-len(sys.argv)]
    return word in _PROGRAMS or (word.startswith("-") and word.partition("m")[2] in _PROGRAMS)


class _Parents(Loader):
    """Loads empty packages instead of torch, until Python has found the program below them."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Do nothing: Python then creates an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it stays empty."""


class _InPlaceLoader(Loader):
    """Loads our modules, or runs them as programs."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module, whose names are looked up on first use."""
        return _InPlace(spec.name, f"Rallypoint's, by rallyctl shim: see `{__name__}`.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""

    def get_code(self, name: str) -> CodeType:
        """The code for `python -m`."""
        for parent in _PARENTS:  # a plug-in may import torch, and must get the real one
            if isinstance(getattr(sys.modules.get(parent), "__loader__", None), _Parents):
                del sys.modules[parent]
        text = f"import sys; from {__name__} import run_command; sys.exit(run_command({name!r}))"
        return compile(text, f"<{name} by rallyctl shim>", "exec")


def run_command(module: str) -> int:
    """Run `python -m torch.distributed.run`, or `.launch`. Returns the exit code."""
    from rallypoint.cli.rallyrun import main, main_deprecated

    command = main_deprecated if module == "torch.distributed.launch" else main
    return command(in_place_of=f"python -m {module}")


class _InPlace(ModuleType):
    """A module that replaces one of torch's."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        value = getattr(_own_module(module), name)
        return _launching(module, name) if name in _LAUNCHING and callable(value) else value

    @property
    def torchs_own(self) -> ModuleType:
        """The torch module that this one hides."""
        return _torchs_own(self.__name__)


def _own_module(module: str) -> ModuleType:
    return import_module(f"rallypoint.compat.{module.removeprefix('torch.distributed.')}")


def _torchs_own(module: str) -> ModuleType:
    """Torch's own module, next to ours. All of them are imported together, so that they use one another."""
    global _finding_torchs
    if module not in _torchs:
        hidden = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
        _finding_torchs = True
        try:
            _torchs.update((name, import_module(name)) for name in MODULES)
        finally:
            _finding_torchs = False
            for name in MODULES:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)
            for name, shim in hidden.items():
                parent, _, child = name.rpartition(".")
                setattr(sys.modules[parent], child, shim)
    return _torchs[module]


# Launches


@cache
def _launching(module: str, name: str) -> Any:
    """Our function or class that launches, for a program that finds it in a torch module."""
    ours = getattr(_own_module(module), name)
    if name == "elastic_launch":

        def call(self: Any, *args: Any) -> Any:
            launch = _launching(module, "launch_agent")
            return launch(self._config, self._entrypoint, list(args), self._health_check_server)

        return type(name, (ours,), {"__doc__": ours.__doc__, "__module__": module, "__call__": call})

    @wraps(ours)
    def launch(*given: Any, **named: Any) -> Any:
        configure()
        if why := next(_changes(), ""):
            _log.warning(
                "torch's own launcher is used despite rallyctl shim, because the program modified it (%s)", why
            )
            theirs = getattr(_torchs_own_changed(module), name)
            return theirs(
                *map(_config_of_torch, given), **{key: _config_of_torch(value) for key, value in named.items()}
            )
        for config in (*given, *named.values()):
            if isinstance(config, LaunchConfig):
                _take_over(config, config.logs_specs, config.numa_options)
        context = copy_context()
        context.run(announce, module)
        try:
            return context.run(ours, *given, **named)
        except Exception as error:
            _make_torchs(error)
            raise

    return launch


def _take_over(config: LaunchConfig, specs: Any, numa: Any) -> None:
    """Replace torch's values in a config with ours."""
    if not isinstance(specs, LogsSpecs):
        redirects, tee = _streams(specs._redirects), _streams(specs._tee)
        config.logs_specs = DefaultLogsSpecs(specs._root_log_dir, redirects, tee, specs._local_ranks_filter)
    if numa is not None and not isinstance(numa, NumaOptions):
        config.numa_options = NumaOptions(numa.affinity_mode, numa.should_fall_back_if_binding_fails)


def _streams(value: Any) -> Std | dict[int, Std]:
    return {rank: Std(stream) for rank, stream in value.items()} if isinstance(value, dict) else Std(value)


def _make_torchs(error: Exception) -> None:
    """Let programs catch an exception as torch's too."""
    for kind in type(error).__mro__:
        module = sys.modules.get(_ERRORS.get(kind.__name__, ""))
        if module is not None:  # otherwise no code can know the class
            names = {"__module__": kind.__module__, "__qualname__": type(error).__qualname__}
            error.__class__ = type(type(error).__name__, (type(error), getattr(module, kind.__name__)), names)
            return


# Programs that keep torch's own launcher


def _changes() -> Iterator[str]:
    """Find the program's changes to torch's launcher, and its classes derived from torch's."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, _InPlace):
            yield from (f"{name}.{changed}" for changed in _set_by_program(module))
        if not name.startswith(_ELASTIC):
            continue
        for attribute, value in list(vars(module).items()):
            if _is_foreign(value):
                yield f"{name}.{attribute}"
            elif isinstance(value, type) and value.__module__ == name:
                yield from (f"{name}.{attribute}.{key}" for key, part in vars(value).items() if _is_foreign(part))
                derived: list[type] = type.__subclasses__(value)
                yield from (
                    f"{subclass.__module__}.{subclass.__qualname__}" for subclass in derived if _is_foreign(subclass)
                )


def _set_by_program(module: ModuleType) -> dict[str, Any]:
    names = vars(module).items()
    return {name: value for name, value in names if not (name.startswith("__") or isinstance(value, ModuleType))}


def _is_foreign(value: Any) -> bool:
    """Whether a function or class, or a substitute for one, is neither torch's, nor Python's, nor ours."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        home = value.__globals__.get("__name__", "")  # `wraps` may have copied `__module__`
    elif isinstance(value, type):
        home = value.__module__
    else:
        home = type(value).__module__
        return home == "unittest.mock"
    return home.partition(".")[0] not in _KNOWN and not home.startswith("namedtuple_")


def _torchs_own_changed(module: str) -> ModuleType:
    """Torch's own module, with the names that the program set in ours."""
    own = _torchs_own(module)
    for name in MODULES:
        if (ours := sys.modules.get(name)) is not None:
            vars(_torchs[name]).update(_set_by_program(ours))
    return own


def _config_of_torch(value: Any) -> Any:
    """Convert our `LaunchConfig` to torch's; return any other value unchanged."""
    if not isinstance(value, LaunchConfig):
        return value
    from dataclasses import fields

    kind = _torchs["torch.distributed.launcher.api"].LaunchConfig
    names = {field.name for field in fields(kind) if field.init} - {"metrics_cfg"}
    values = {name: getattr(value, name) for name in names}
    if isinstance(value.logs_specs, LogsSpecs):
        values["logs_specs"] = None
    return kind(**values)
