"""Makes the files of an incident bundle from what a node knows about itself and its workers. Off the agent's loop."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata

from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.private_files import open_regular
from rallypoint.base.process_table import read_stat
from rallypoint.failures.report import failure_detail
from rallypoint.observe.bundle import Piece
from rallypoint.observe.masking import helpful_variables, mask_command, mask_environment, mask_strings, mask_text

if TYPE_CHECKING:
    from rallypoint.agent.controller import WorkerController
    from rallypoint.agent.spec import Worker
    from rallypoint.base.process_table import ProcessStat
    from rallypoint.failures.cause import Cause
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.protocol.observation import Snapshot
    from rallypoint.workers.context import PContext

LINES = 1000
"""Lines of each output of a worker that are kept."""
_MOST_READ = 512 * 1024
"""Bytes of one output that are kept."""
_MOST_KERNEL = 64 * 1024
_LARGEST_RECORD = 8 * 1024 * 1024
"""Bytes of one file of the flight recorder."""

MORE_VARIABLES = "RALLYPOINT_INCIDENT_ENV"
"""The variable that names further variables that a bundle shows."""
_PACKAGES = ("rallypoint", "torch", "numpy", "msgspec", "uvloop", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_FLIGHT_RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the prefix of the paths that workers dump their flight recorders to; the rank follows."""
_DEFAULT_RECORDER = "torch/comm_lib_trace_rank_"
"""Where torch dumps by default, below the user's cache. Older versions did in /tmp, where anybody may put files."""
_KERNEL = re.compile(
    r"out of memory|oom-kill|oom_reaper|killed process|segfault|NVRM|\bXid\b|hung_task|blocked for more"
)


class Incident(NamedTuple):
    """A failure of the job, as reported to this node. `ends_job`: there is no restart."""

    round: int
    why: str
    detail: str
    ends_job: bool
    cause: Cause | None = None

    @property
    def headline(self) -> str:
        """One line for people."""
        return self.cause.headline if self.cause is not None else self.detail


class WorkerFacts(NamedTuple):
    """One worker: `added` is what its environment has beyond the agent's, `last_lines` returns the end of its standard
    error if that goes to no file. `process` is None if it had ended; unlike `pid`, it never stands for another process.
    """

    rank: int
    local_rank: int
    pid: int
    stdout: str
    stderr: str
    error_file: str
    added: Mapping[str, str]
    last_lines: Callable[[], bytes]
    process: ProcessStat | None = None


class NodeFacts(NamedTuple):
    """This node, as its agent's loop knows it. `since` is when its workers were started, in seconds since 1970."""

    job: str
    role: str
    round: int
    host: str
    pid: int
    group_rank: int
    group_world_size: int
    restarts: int
    since: float
    program: str
    workers: tuple[WorkerFacts, ...]
    failures: Mapping[int, ProcessFailure]


def node_facts(controller: WorkerController) -> NodeFacts:
    """What is known about this node and its workers at this moment. On the loop's thread."""
    group, spec, context = controller.group, controller.group.spec, controller.pcontext
    return NodeFacts(
        job=spec.rdzv_handler.get_run_id(),
        role=spec.role,
        round=-1 if group.placement is None else group.placement.round,
        host=os.uname().nodename,
        pid=os.getpid(),
        group_rank=-1 if group.group_rank is None else group.group_rank,
        group_world_size=group.group_world_size or 0,
        restarts=group.restarts,
        since=controller.started_at,
        program=spec.get_program_name(),
        workers=() if context is None else _workers(group.workers, context),
        failures={} if context is None else controller.failures,
    )


def _workers(workers: Sequence[Worker], context: PContext) -> tuple[WorkerFacts, ...]:
    pids, ended = context.pids(), context.exit_codes
    running = {rank: read_stat(pid) for rank, pid in pids.items() if rank not in ended}
    return tuple(_worker_facts(each, context, pids, running) for each in workers)


def _worker_facts(
    worker: Worker, context: PContext, pids: Mapping[int, int], running: Mapping[int, ProcessStat | None]
) -> WorkerFacts:
    local_rank = worker.local_rank
    return WorkerFacts(
        rank=worker.global_rank,
        local_rank=local_rank,
        pid=pids.get(local_rank, 0),
        stdout=context.stdouts.get(local_rank, ""),
        stderr=context.stderrs.get(local_rank, ""),
        error_file=context.error_files.get(local_rank, ""),
        added=context.envs[local_rank],
        last_lines=context.last_lines(local_rank),
        process=running.get(local_rank),
    )


def summary_of(incident: Incident, facts: NodeFacts) -> dict[str, Any]:
    """The fields of `incident.json`, without what the bundle itself adds."""
    cause = incident.cause
    return {
        "job": facts.job,
        "round": incident.round,
        "at": time.time(),
        "why": incident.why,
        "headline": mask_text(incident.headline),
        "detail": mask_text(incident.detail),
        "ends_job": incident.ends_job,
        "cause": None if cause is None else mask_strings({**cause._asdict(), "traceback": "see failure.txt"}),
        "node": {
            "host": facts.host,
            "pid": facts.pid,
            "role": facts.role,
            "group_rank": facts.group_rank,
            "group_world_size": facts.group_world_size,
            "ranks": [each.rank for each in facts.workers],
            "pids": [each.pid for each in facts.workers],
        },
        "restarts_used": facts.restarts,
        "program": facts.program,
        "command": mask_command(sys.orig_argv),
        "working_folder": _quietly(os.getcwd, ""),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    system = os.uname()
    found = {"python": sys.version.split()[0], "kernel": f"{system.sysname} {system.release} {system.machine}"}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    driver = _read("/proc/driver/nvidia/version", 4096).decode(errors="replace").partition("\n")[0]
    return {**found, "nvidia driver": driver} if driver else found


def stack_pieces(facts: NodeFacts) -> list[Piece]:
    """The Python stacks of the workers that run, where py-spy can read them."""
    from rallypoint.hangs.report import stack_lines
    from rallypoint.hangs.stacks import stacks_of_workers

    pids = {each.rank: each.pid for each in facts.workers if each.process is not None and each.process.is_running()}
    if not pids:
        return []
    text = "\n".join(stack_lines(stacks_of_workers(pids)))
    return [Piece("stacks.txt", f"{mask_text(text)}\n".encode(errors="replace"))]


def pieces_of(facts: NodeFacts, incident: Incident) -> Iterator[Piece]:
    """The other files, the most important first."""
    if incident.cause is not None:
        text = f"{incident.cause.headline}\n\n{failure_detail(incident.cause)}\n"
        yield Piece("failure.txt", mask_text(text).encode())
    yield Piece("system.txt", mask_text(_system(facts)).encode(errors="replace"))
    yield Piece("environment.txt", _environment(facts).encode(errors="replace"))
    for worker in facts.workers:
        yield from _outputs(worker)
    yield from _flight_records(facts)


def _outputs(worker: WorkerFacts) -> Iterator[Piece]:
    folder = f"workers/rank_{worker.rank}"
    for name, path in (("stdout.txt", worker.stdout), ("stderr.txt", worker.stderr)):
        data = last_lines(_read_end(path)) if path and path != os.devnull else b""
        if not data and name == "stderr.txt":
            data = last_lines(_quietly(worker.last_lines, b""))
        if data:
            yield Piece(f"{folder}/{name}", _masked(data))
    if error := _read_end(worker.error_file):
        yield Piece(f"{folder}/error.json", _masked(error))


def _masked(data: bytes) -> bytes:
    return mask_text(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def last_lines(data: bytes, count: int = LINES) -> bytes:
    """The last lines of a text, at most this many."""
    ended = data.endswith(b"\n")
    lines = (data[:-1] if ended else data).split(b"\n")
    return b"\n".join(lines[-count:]) + (b"\n" if ended else b"") if data else b""


def _environment(facts: NodeFacts) -> str:
    more = os.environ.get(MORE_VARIABLES, "").split(",")

    def lines(environ: Mapping[str, str]) -> list[str]:
        helpful = helpful_variables(environ, more)
        return [f"{name}={value!r}" for name, value in mask_environment(helpful).items()]

    shown = lines(os.environ)
    for worker in facts.workers:
        shown += ["", f"# beyond that, rank {worker.rank}:", *lines(worker.added)]
    head = (
        f"# of the agent, secrets masked; variables that help to understand a failure, and those of {MORE_VARIABLES}:"
    )
    return "\n".join([head, *shown, ""])


# The kernel's log


def _system(facts: NodeFacts) -> str:
    parts = ["# what is known of how workers ended"]
    for rank, failure in sorted(facts.failures.items()):
        parts.append(f"rank {rank} (pid {failure.pid}), exit code {failure.exitcode}: {failure.text}")
        parts += [failure.context] if failure.context else []
    words = kernel_words(_kernel_log(), {each.pid for each in facts.workers})
    parts += ["", "# the kernel's log, where it may be read: of these processes, of memory, of GPUs", *words]
    for path in ("/proc/meminfo", "/proc/loadavg", *(f"/proc/pressure/{each}" for each in ("cpu", "memory", "io"))):
        if text := _read(path, 4096).decode(errors="replace"):
            parts += ["", f"# {path}", "\n".join(text.splitlines()[:12])]
    group = _own_group()
    for name in ("memory.events", "memory.max", "memory.current", "pids.max", "pids.current") if group else ():
        if text := _read(f"{group}/{name}", 4096).decode(errors="replace"):
            parts += ["", f"# {group}/{name}", text.rstrip()]
    return "\n".join([*parts, ""])


def kernel_words(lines: Sequence[str], pids: set[int]) -> list[str]:
    """The lines of the kernel's log that name one of these processes, or something that kills processes."""
    named = re.compile(rf"(?<!\d)(?:{'|'.join(map(str, sorted(pids)))})(?!\d)") if pids else None
    return [each for each in lines if _KERNEL.search(each) or (named is not None and named.search(each))][-200:]


def _kernel_log() -> list[str]:
    """The kernel's log, without priorities; empty if that may not be read."""
    from rallypoint.base.kernel_log import log_entries, raw_entries

    try:
        return [f"[{each.moment:.3f}] {each.text}" for each in log_entries(raw_entries())]
    except OSError:
        return []


def _own_group() -> str:
    for line in _read("/proc/self/cgroup", 4096).decode(errors="replace").splitlines():
        if line.startswith("0::"):
            path = f"/sys/fs/cgroup{line[3:].rstrip('/')}"
            return path if os.path.exists(f"{path}/memory.events") else "/sys/fs/cgroup"
    return ""


# The flight recorder of torch's process groups


def _flight_records(facts: NodeFacts) -> Iterator[Piece]:
    for worker in facts.workers:
        for start in flight_recorder_paths({**os.environ, **worker.added}):
            path = f"{start}{worker.rank}"
            with suppress(OSError), open(open_regular(path), "rb") as file:
                seen = os.fstat(file.fileno())
                if seen.st_mtime < facts.since or seen.st_uid != os.geteuid():
                    continue  # of another run, or another user's
                if seen.st_size <= _LARGEST_RECORD and (data := file.read(_LARGEST_RECORD)):
                    yield Piece(f"flight_recorder/rank_{worker.rank}", data, is_whole=True)
                break


def flight_recorder_paths(environ: Mapping[str, str]) -> list[str]:
    """The prefixes of the paths of dumps, according to a worker's environment."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return [*(environ[each] for each in _FLIGHT_RECORDER if environ.get(each)), os.path.join(cache, _DEFAULT_RECORDER)]


# The index


def index_fields(seen: Snapshot, why: str, headline: str, by: str) -> dict[str, Any]:
    """The state of the job over all nodes, as the coordinator's node knows it."""
    from rallypoint.observe.bundle import safe_name
    from rallypoint.observe.status import status_fields

    folders = {each.name: f"{safe_name(each.host)}-{each.pid}" for each in seen.nodes}
    now = time.time()
    status = status_fields(seen, now)
    return {
        "job": seen.job,
        "round": seen.round,
        "at": now,
        "why": why,
        "headline": mask_text(headline),
        "written_on": by,
        "folders": folders,
        "status": {**status, **{name: mask_strings(status[name]) for name in ("detail", "failures", "events")}},
    }


# Reading


def _read(path: str, most: int) -> bytes:
    """Read a file of the kernel's."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(most)
    return b""


def _read_end(path: str) -> bytes:
    if not path:
        return b""
    with suppress(OSError), open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_READ))
        return file.read(_MOST_READ)
    return b""


def _quietly(call: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return call()
    except (OSError, ValueError, RuntimeError):
        return otherwise
