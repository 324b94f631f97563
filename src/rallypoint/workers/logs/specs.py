"""Decides where each worker's streams go: to which file in which folder (contract sections 6.3, 6.4 and 6.7), and with
which prefix to the console (6.5).

    <log_dir>/<run_id>_<host>_XXXXXXXX/attempt_<n>/<local rank>/{stdout.log, stderr.log, error.json}
    <log_dir>/<run_id>_<host>_XXXXXXXX/rank_<global rank>_attempt_<n> -> attempt_<n>/<local rank>

Laws:
- nodes can share `log_dir`: each run of an agent has its own folder there, named after its host;
- that folder has the contract's layout. The links are for people, and exist only if a stream goes to a file;
- each start of the worker group has its own folder. If `attempt_<n>` exists, because a new membership restarted the
workers without using up a restart, the next is `attempt_<n>.1`, so no round overwrites another's files;
- a folder is never removed unless it is empty;
- if lines of several hosts are merged, as under `srun`, each starts with `<host>: `, the `pdsh` format that `dshbak`
parses.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntFlag

from rallypoint.base.errors import UserError, user_error
from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import Any
from rallypoint.base.log import get_logger
from rallypoint.failures.record import VARIABLE

log = get_logger(__name__)

_ERROR_FILE = "error.json"
_MAX_NAME = 200
"""Maximum bytes of the run id and the host in the name of a run's folder; file systems permit 255 per name."""
_MAX_HOST = 64
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"

DEFAULT_TEMPLATE = "[${role_name}${local_rank}]:"
TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""Environment variable that replaces the default template unless `--log-line-prefix-template` is set."""

_ONE = re.compile(r"[0-3]")
_PER_RANK = re.compile(r"(?:[0-9]:[0-3],)*[0-9]:[0-3]")


class Std(IntFlag):
    """Neither, one or both of standard output and standard error."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse one digit for all local ranks, or `local rank:digit` pairs. The argument's name is torch's.

        If a rank is named twice, its last value counts, as in torchrun.

        Raises:
            UserError: the text is neither.
        """
        if _ONE.fullmatch(vm):
            return cls(int(vm))
        if _PER_RANK.fullmatch(vm):
            pairs = (pair.split(":") for pair in vm.split(","))
            return {int(rank): cls(int(value)) for rank, value in pairs}
        raise UserError(
            f"{vm!r} is not a valid choice of output streams; use one digit for all workers ([0-3]: 0 none, 1 stdout, "
            "2 stderr, 3 both), or pairs of a local rank and a digit, separated by commas ([0-9]:[0-3], as in 0:1,1:3)"
        )


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return one value per local rank: a single value for all, or a mapping with `Std.NONE` for missing ranks."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass(frozen=True)
class LogsDest:
    """The output destinations of one start of a worker group. Keys are local ranks, values are paths.

    An empty path in `stdouts` or `stderrs` means the console, `/dev/null` means hidden. A stream in `tee_stdouts` or
    `tee_stderrs` goes to its file and, from there, to the console.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """The layout of the output; base class of plug-ins in the entry-point group `torchrun.logs_specs`.

    Args:
        log_dir: the base folder for logs; with None, the subclass chooses.
        redirects: streams that go only to files; one value for all workers, or one per local rank.
        tee: streams that go to files and to the console.
        local_ranks_filter: the local ranks to show on the console; None or empty means all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        # These names are part of the contract: plug-ins read them.
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of one start of the workers and create their folders.

        `envs` contains the additions to each worker's environment by local rank. The specs can add more, such as
        `TORCHELASTIC_ERROR_FILE`.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str | None:
        """The base folder, for messages; None if it does not exist yet."""

    @property
    def run_log_dir(self) -> str | None:
        """This run's folder on this node, for messages; the base folder unless each run has its own."""
        return self.root_log_dir

    def clean_up(self) -> None:
        """Remove what the job did not need. Called once after the job. Does nothing here."""
        return

    @property
    def temporary(self) -> str | None:
        """The folder in which `clean_up` would remove empty folders; None without one."""
        return None


PLUGIN_GROUP = "torchrun.logs_specs"


def plugin_specs(name: str, **arguments: Any) -> LogsSpecs:
    """Create log specs from an installed package with `arguments` (contract section 1.11). Raises UserError."""
    from rallypoint.base.plugins import plugin

    specs = plugin(PLUGIN_GROUP, name, "log specs", ["default"], lambda offer: offer(**arguments))
    if not isinstance(specs, LogsSpecs):
        raise UserError(
            f"the log specs {name!r} are a {type(specs).__module__}.{type(specs).__qualname__}, not "
            "Rallypoint's LogsSpecs; if they were written for torch, change them to import LogsSpecs from Rallypoint"
        )
    return specs


class DefaultLogsSpecs(LogsSpecs):
    """The layout described above. `log_dir="/dev/null"` creates no files and no folder.

    Without a `log_dir` the base is a new folder `torchelastic_XXXXXXXX` in the folder for temporary files.

    Raises:
        UserError: `log_dir` is a file.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and log_dir != os.devnull and os.path.exists(log_dir) and not os.path.isdir(log_dir):
            text = f"--log-dir {log_dir!r} is a file; use a folder"
            raise user_error(text, NotADirectoryError)
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        self._root_is_temporary = not log_dir
        self._run_log_dir: str | None = None

    def __repr__(self) -> str:
        shown = {"root_log_dir": self._root_log_dir, "redirects": self._redirects, "tee": self._tee}
        named = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{type(self).__name__}({named}, local_ranks_filter={self._local_ranks_filter})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._settings() == other._settings()

    __hash__ = None  # type: ignore[assignment]

    def _settings(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter

    @property
    def root_log_dir(self) -> str | None:
        """The base folder; None until the first start if the user did not set one."""
        return self._root_log_dir

    @property
    def run_log_dir(self) -> str | None:
        """This run's folder on this node, if it has one."""
        return self._run_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the folders of this start, and add `TORCHELASTIC_ERROR_FILE` to each worker's environment.

        The run id and attempt come from `envs[0]` (`TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT`); the defaults
        are `test_run_id` and 0.

        Raises:
            UserError: a folder cannot be created.
        """
        if self._root_log_dir == os.devnull:
            return self._console_only(envs)
        first: Mapping[str, str] = envs.get(0, {})
        attempt = self._attempt_folder(
            first.get("TORCHELASTIC_RUN_ID", "test_run_id"), first.get("TORCHELASTIC_RESTART_COUNT", "0")
        )
        error_files = {}
        for local_rank, env in envs.items():
            folder = f"{attempt}/{local_rank}"
            try:
                os.mkdir(folder)
            except OSError as error:
                raise _refused(folder, error) from error
            error_files[local_rank] = f"{folder}/{_ERROR_FILE}"
            env[VARIABLE] = os.path.abspath(error_files[local_rank])  # the worker might change its working directory
        stdouts, tee_stdouts = self._stream(Std.OUT, "stdout.log", attempt, len(envs))
        stderrs, tee_stderrs = self._stream(Std.ERR, "stderr.log", attempt, len(envs))
        logged = [rank for rank in envs if {stdouts[rank], stderrs[rank]} - {"", os.devnull}]
        _link_by_rank(attempt, {rank: envs[rank].get("RANK", "") for rank in logged})
        return LogsDest(
            stdouts,
            stderrs,
            tee_stdouts,
            tee_stderrs,
            error_files,
            filtered_stdout=os.path.join(attempt, "filtered_stdout.log"),
            filtered_stderr=os.path.join(attempt, "filtered_stderr.log"),
        )

    @property
    def temporary(self) -> str | None:
        """The base folder, if the user did not set one and it was created."""
        return self._root_log_dir if self._root_is_temporary else None

    def clean_up(self) -> None:
        """Remove empty folders in a temporary base folder. In a user's folder, tools might expect the layout."""
        root = self.temporary
        if root is None:
            return
        if self._run_log_dir is not None and remove_empty(self._run_log_dir):
            self._run_log_dir = None
        if remove_empty(root):
            self._root_log_dir = None

    def _attempt_folder(self, run_id: str, attempt: str) -> str:
        # A cleaner of temporary files might have removed folders.
        if self._root_is_temporary and self._root_log_dir is not None and not os.path.isdir(self._root_log_dir):
            self._root_log_dir = None
        if self._root_log_dir is None:
            self._root_log_dir = make_unique(folder := temporary_folder(), "torchelastic_")
            if folder == _MEMORY:
                log.warning(
                    "the workers' files go to shared memory (%s), because no other folder is writable; set TMPDIR or "
                    "--log-dir to a writable folder",
                    folder,
                )
        if self._run_log_dir is None or not os.path.isdir(self._run_log_dir):
            node = _safe_name(os.uname().nodename, _MAX_HOST)
            run = _safe_name(run_id, _MAX_NAME - len(os.fsencode(node)))
            self._run_log_dir = make_unique(self._root_log_dir, f"{run}_{node}_")
        return make_next(self._run_log_dir, f"attempt_{attempt}")

    def _stream(self, std: Std, name: str, attempt: str, nprocs: int) -> tuple[dict[int, str], dict[int, str]]:
        """Choose a stream's files, and those that are also shown, from the table in contract section 6.4."""
        redirects, tee = to_map(self._redirects, nprocs), to_map(self._tee, nprocs)
        files, shown = {}, {}
        for rank in range(nprocs):
            to_console = not self._local_ranks_filter or rank in self._local_ranks_filter
            path = f"{attempt}/{rank}/{name}"
            if std in tee[rank]:
                files[rank] = path
                if to_console:
                    shown[rank] = path
            elif std in redirects[rank]:
                files[rank] = path
            else:
                files[rank] = "" if to_console else os.devnull
        return files, shown

    @staticmethod
    def _console_only(envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env[VARIABLE] = ""
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(nowhere), stderrs=dict(nowhere), error_files=dict(nowhere))


def log_only_in_files(dest: LogsDest, role: str) -> bool:
    """Log where to find output that no console shows. Returns whether any exists."""
    streams = ((dest.stdouts, dest.tee_stdouts), (dest.stderrs, dest.tee_stderrs))
    paths = [path for files, shown in streams for path in {*files.values()} - {"", os.devnull, *shown.values()}]
    if not paths:
        return False
    folder = os.path.commonpath([os.path.abspath(os.path.dirname(path)) for path in paths])
    names = " and ".join(sorted({os.path.basename(path) for path in paths}))
    log.warning("[%s] the workers' output goes only to files: %s in %s", role, names, folder)
    return True


def link_log(path: str, link: str) -> None:
    """Link the log of a worker that continues from an earlier attempt into this attempt's folder."""
    if link not in ("", os.devnull, path):
        with contextlib.suppress(OSError):  # the file system has no links
            os.symlink(os.path.relpath(path, os.path.dirname(link)), link)


def _safe_name(name: str, limit: int) -> str:
    """Replace path separators in a name, and cut it to `limit` bytes."""
    return os.fsencode(name.replace(os.sep, "_"))[:limit].decode(errors="ignore")


def _link_by_rank(attempt: str, global_ranks: Mapping[int, str]) -> None:
    """Link these local ranks' folders under their global ranks, if known."""
    run, name = os.path.split(attempt)
    for local_rank, rank in global_ranks.items():
        if rank:
            with contextlib.suppress(OSError):  # the file system has no links
                os.symlink(f"{name}/{local_rank}", f"{run}/rank_{rank}_{name}")


# Prefixes


def line_prefixes(template: str | None, role_name: str, ranks: Mapping[int, int], attempt: int = 0) -> dict[int, str]:
    """Format the prefix of each local rank.

    Args:
        template: `${role_name}`, `${rank}`, `${local_rank}` and `${hostname}` (this node's name) are replaced, and,
            beyond torch, `${host}` (the same) and `${attempt}`; other names stay. None or empty is the default,
            `[<role><local rank>]:`.
        role_name: the role of these workers.
        ranks: global ranks by local rank.
        attempt: restarts used, as in the name of the log folder `attempt_<n>`.
    """
    from string import Template

    pattern = Template(template or DEFAULT_TEMPLATE)
    node = os.uname().nodename
    common = {"role_name": role_name, "hostname": node, "host": node, "attempt": attempt}
    return {
        local_rank: pattern.safe_substitute(common, rank=rank, local_rank=local_rank)
        for local_rank, rank in ranks.items()
    }


def host_label(when: str, environ: Mapping[str, str]) -> str:
    """This host's name as a prefix; empty for `never`, and for `auto` unless `srun` merges several nodes' lines."""
    return f"{os.uname().nodename}: " if when == "always" or (when == "auto" and _merged_by_srun(environ)) else ""


def with_host(template: str | None, label: str) -> str | None:
    """Prepend the host's label to the template, unless the template contains the host itself."""
    if not label or "$host" in (template or "").replace("{", ""):
        return template
    return label.replace("$", "$$") + (template or DEFAULT_TEMPLATE)


def _merged_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process on several nodes, and so merges their output."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return False
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    return nodes.isdecimal() and int(nodes) > 1


# Folders, without the cost of importing `tempfile`


_MEMORY = "/dev/shm"
"""Last resort if the root is read-only: most containers can write to it."""


def temporary_folder() -> str:
    """The folder for temporary files: the first of `TMPDIR`, `TEMP`, `TMP` and the usual ones that is writable.

    Raises:
        UserError: no folder is writable.
    """
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    candidates = [*named, "/tmp", "/var/tmp", "/usr/tmp", ".", _MEMORY]
    for folder in candidates:
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            try:
                return os.path.abspath(folder)
            except FileNotFoundError:  # the path is relative, and the working directory was deleted
                continue
    raise UserError(
        f"none of the temporary folders is writable: {', '.join(candidates)}; set TMPDIR to a writable folder"
    )


def make_unique(parent: str, prefix: str) -> str:
    """Create a folder `<parent>/<prefix>XXXXXXXX` for this user only, and its parents. Raises UserError."""
    make_all(parent)
    while True:
        suffix = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(8))
        path = os.path.join(parent, prefix + suffix)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _refused(path, error) from error
        return path


def make_next(parent: str, name: str) -> str:
    """Create the first missing folder of `<parent>/<name>`, `<name>.1`, `<name>.2` ... Raises UserError."""
    path, number = os.path.join(parent, name), 0
    while True:
        try:
            os.mkdir(path)
        except FileExistsError:
            number += 1
            path = os.path.join(parent, f"{name}.{number}")
        except OSError as error:
            raise _refused(path, error) from error
        else:
            return path


def make_all(path: str) -> None:
    """Create a folder and its missing parents. Raises UserError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error


def remove_empty(path: str) -> bool:
    """Remove a folder and the folders below it if they are empty. Returns whether it is gone."""
    try:
        with os.scandir(path) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            remove_empty(folder)
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:  # it is not empty, or we may not remove it
        return False
    return True


def _refused(path: str, error: OSError) -> UserError:
    return user_error(
        f"the log folder {path!r} cannot be created: {error.strerror or error}; choose another folder with --log-dir",
        error,
    )
